# distutils: language = c++
"""What this process has advised the kernel about huge pages. See hugepages.hpp."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t

from rmm_managed_bridge._native cimport core
from rmm_managed_bridge._native.core cimport HugepageAdvice, Madvise


def counters():
    """Return (bytes that carry advice now, calls of `madvise`, how many of them failed)."""
    cdef HugepageAdvice* advice = &core.process.hugepages
    return <int64_t>advice.advised_bytes, <uint64_t>advice.calls, <uint64_t>advice.failures


def ask_instead(uintptr_t function):
    """For tests: call this C function, with the arguments of `madvise`, instead of the kernel's. 0: the kernel's."""
    core.process.hugepages.ask_instead(<Madvise>function)
