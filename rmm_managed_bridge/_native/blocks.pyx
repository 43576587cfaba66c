# distutils: language = c++
"""What lies at an address, and the device work that may touch it. See block_calls.hpp."""

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t, uintptr_t
from libcpp cimport bool

from rmm_managed_bridge._native.process cimport CPool, CProcess, CUstream, Refusal, process


from rmm_managed_bridge._native import messages
from rmm_managed_bridge._native.process import KINDS
from rmm_managed_bridge.errors import BridgeError


cdef extern from "pool/block_calls.hpp" namespace "rmm_bridge" nogil:
    CPool* pool_of(CProcess* process, const void* ptr)
    bool live_block(CProcess* process, const void* ptr, uintptr_t& start, size_t& size_bytes)
    int record_stream_use(CProcess* process, const void* ptr, CUstream stream) except +
    bool order_block(CProcess* process, const void* ptr, CUstream stream, Refusal& refusal) except +
    Refusal synchronize_block(CProcess* process, const void* ptr) except +
    bool pointer_attribute(CProcess* process, uintptr_t ptr, int which, int device, uint64_t& value)
    bool reaches_address "rmm_bridge::reaches"(CProcess* process, uintptr_t ptr, int device)


def block_of(address):
    """Return (start, usable bytes) of the live block that `address` lies in, or None."""
    cdef uintptr_t ptr
    cdef uintptr_t start = 0
    cdef size_t size_bytes = 0
    try:
        ptr = address
    except OverflowError:
        return None
    if not live_block(process, <const void*>ptr, start, size_bytes):
        return None
    return start, size_bytes


def kind_of(uintptr_t ptr):
    """Return the memory kind of the pool that `ptr` lies in, or None."""
    cdef CPool* pool = pool_of(process, <const void*>ptr)
    return None if pool == NULL else KINDS[pool.kind()]


def device_of(uintptr_t ptr):
    """Return the device of the pool that `ptr` lies in (-1 for host), or None."""
    cdef CPool* pool = pool_of(process, <const void*>ptr)
    return None if pool == NULL else pool.device()


def driver_attribute(address, int attribute, int device=-1):
    """Return what the driver says of an address: a `CUpointer_attribute` by number, or None if it knows nothing of it.

    With `device`, as that device sees it. Touches no data, makes no context and leaves captures alone.
    """
    cdef uint64_t value = 0
    cdef uintptr_t ptr
    try:
        ptr = address
    except OverflowError:
        return None
    return value if pointer_attribute(process, ptr, attribute, device, value) else None


def reaches(uintptr_t ptr, int device):
    """Return whether `device` may read and write the device memory at `ptr`, which is another device's."""
    return reaches_address(process, ptr, device)


def record_stream(uintptr_t ptr, uintptr_t stream):
    """Note that work on `stream` may touch the block at `ptr`. Return False if no live block is there."""
    cdef int result = record_stream_use(process, <const void*>ptr, <CUstream>stream)
    if result == 3:
        raise BridgeError(
            f"stream {stream:#x} cannot be recorded: it is being captured, and the bridge has not seen it before; make an "
            "array on it, or a view for it, before the capture begins"
        )
    if result == 2:
        raise BridgeError(
            f"stream {stream:#x} cannot be recorded: the driver does not know it; it may have been destroyed"
        )
    return result == 0


def order(uintptr_t ptr, uintptr_t stream):
    """Make `stream` wait for the device work on the block at `ptr`, and note that it may touch the block from now on.

    Nothing waits on the CPU. Return False if no live block is there.
    """
    cdef Refusal refusal = Refusal.none
    if not order_block(process, <const void*>ptr, <CUstream>stream, refusal):
        return False
    if refusal == Refusal.unheld_stream:
        raise messages.unheld_stream(ptr)
    if refusal != Refusal.none:
        raise BridgeError(
            f"stream {stream:#x} cannot be ordered after the work on {ptr:#x}: one of the streams is being captured, or "
            "was destroyed; make views before the capture begins"
        )
    return True


def synchronize(uintptr_t ptr):
    """Wait until device work on the block at `ptr` is finished. Releases the GIL while it waits."""
    cdef Refusal refusal = synchronize_block(process, <const void*>ptr)
    cdef CPool* pool = pool_of(process, <const void*>ptr)
    if refusal == Refusal.capturing and pool != NULL and pool.options().device_wait:
        raise BridgeError(
            f"the CPU cannot have the memory at {ptr:#x} now: this device does not share managed memory with the CPU while "
            "it is busy, and waiting for all of it would destroy the capture that is going on; end the capture first"
        )
    if refusal == Refusal.capturing:
        raise BridgeError(
            f"the memory at {ptr:#x} is used on a stream that is being captured: the CPU cannot wait for it; "
            "end the capture first"
        )
    if refusal == Refusal.unheld_stream:
        raise messages.unheld_stream(ptr)
    if refusal != Refusal.none:
        raise BridgeError(f"the CUDA driver failed while waiting for the work on {ptr:#x}; look at the kernels before it")
