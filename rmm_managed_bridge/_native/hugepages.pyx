# distutils: language = c++
"""What this process has advised the kernel about huge pages. See hugepages.hpp."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t

from rmm_managed_bridge._native cimport core
from rmm_managed_bridge._native.core cimport CProcess


cdef extern from "entry/interpreter.hpp" namespace "rmm_bridge" nogil:
    int64_t advised_bytes(CProcess* process)
    uint64_t advice_calls(CProcess* process)
    uint64_t advice_failures(CProcess* process)
    void replace_madvise(CProcess* process, uintptr_t function)


def counters():
    """Return (bytes that carry advice now, calls of `madvise`, how many of them failed)."""
    return advised_bytes(core.process), advice_calls(core.process), advice_failures(core.process)


def ask_instead(uintptr_t function):
    """For tests: call this C function, with the arguments of `madvise`, instead of the kernel's. 0: the kernel's."""
    replace_madvise(core.process, function)
