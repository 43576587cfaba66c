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
    cdef cppclass LiveBlock:
        CPool* pool
        uintptr_t start
        size_t bytes
        bool borrowed

    cdef cppclass CHandOver "rmm_bridge::HandOver":
        const CUstream* used
        const CUstream* user
        bool cpu
        bool any_stream

    cdef enum class HandedOver(int):
        done
        not_live
        used_not_held
        user_not_held
        used_unknown
        used_capturing
        refused

    CPool* pool_of(CProcess* process, const void* ptr)
    bool live_block(CProcess* process, const void* ptr, LiveBlock& out)
    int record_stream_use(CProcess* process, const void* ptr, CUstream stream) except +
    bool order_block(CProcess* process, const void* ptr, CUstream stream, Refusal& refusal) except +
    Refusal synchronize_block(CProcess* process, const void* ptr) except +
    HandedOver native_hand_over "rmm_bridge::hand_over"(CProcess* process, const void* ptr, const CHandOver& what,
                                                        Refusal& refusal) except +
    bool pointer_attribute(CProcess* process, uintptr_t ptr, int which, int device, uint64_t& value)
    bool reaches_address "rmm_bridge::reaches"(CProcess* process, uintptr_t ptr, int device)


cdef class Block:
    """A live block, as it was when it was found."""

    cdef readonly uintptr_t start
    cdef readonly size_t size_bytes
    cdef readonly str kind
    cdef readonly int device
    cdef readonly bint borrowed

    def __init__(self):
        raise TypeError("a Block is what find() returns")


def find(address):
    """Return the live block that `address` lies in, or None."""
    cdef uintptr_t ptr
    cdef LiveBlock found
    cdef Block block
    try:
        ptr = address
    except OverflowError:
        return None
    if not live_block(process, <const void*>ptr, found):
        return None
    block = Block.__new__(Block)
    block.start = found.start
    block.size_bytes = found.bytes
    block.kind = KINDS[found.pool.kind()]
    block.device = found.pool.device()
    block.borrowed = found.borrowed
    return block


cdef class KnownArray:
    """An array, and what is asked of it more than once: found once, carried through a view, its order and its hints.

    Made in `arrays.layout` from what the array's framework or a protocol tells. `strides` is None for C's order; `low` is
    the lowest address and `size_bytes` the span from there, 0 for no elements; `block` is the live block at `low`, or None, and
    `within` says that all of the array lies in it; `plain` that any library can have it: writable, in the machine's byte order
    and without Python objects.
    """

    cdef readonly object source
    cdef readonly object framework
    cdef readonly uintptr_t ptr
    cdef readonly tuple shape
    cdef readonly object strides
    cdef readonly object dtype
    cdef readonly bint readonly
    cdef readonly uintptr_t low
    cdef readonly size_t size_bytes
    cdef readonly Block block
    cdef readonly bint within
    cdef readonly bint plain

    def __init__(self, source, framework, uintptr_t ptr, tuple shape, strides, dtype, bint readonly):
        cdef Py_ssize_t size_bytes = dtype.itemsize
        cdef Py_ssize_t above = 0
        cdef Py_ssize_t below = 0
        cdef Py_ssize_t length, stride
        cdef bint empty = False
        for i in range(len(shape)):
            length = shape[i]
            empty = empty or length == 0
            if strides is None:
                size_bytes *= length
                continue
            stride = strides[i]
            if stride < 0:
                below -= (length - 1) * stride
            else:
                above += (length - 1) * stride
        self.source = source
        self.framework = framework
        self.ptr = ptr
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.readonly = readonly
        self.low = ptr if empty else ptr - below
        self.size_bytes = 0 if empty else size_bytes + above + below
        self.block = find(self.low)
        self.within = self.block is not None and self.low + self.size_bytes <= self.block.start + self.block.size_bytes
        self.plain = not readonly and dtype.isnative and not dtype.hasobject


def block_of(address):
    """Return (start, usable bytes) of the live block that `address` lies in, or None."""
    cdef Block block = find(address)
    return None if block is None else (block.start, block.size_bytes)


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
    if result > 1:
        raise _not_recorded(stream, result == 3)
    return result == 0


def order(uintptr_t ptr, uintptr_t stream):
    """Make `stream` wait for the device work on the block at `ptr`, and note that it may touch the block from now on.

    Nothing waits on the CPU. Return False if no live block is there.
    """
    cdef Refusal refusal = Refusal.none
    if not order_block(process, <const void*>ptr, <CUstream>stream, refusal):
        return False
    if refusal != Refusal.none:
        raise _not_ordered(ptr, stream, refusal)
    return True


def synchronize(uintptr_t ptr):
    """Wait until device work on the block at `ptr` is finished. Releases the GIL while it waits."""
    cdef Refusal refusal = synchronize_block(process, <const void*>ptr)
    if refusal != Refusal.none:
        raise _not_waited_for(ptr, refusal)


cdef class Loan:
    """Keeps the source of a view, and notes when a device view goes which stream may still be using it.

    `current` tells the consumer's current stream on `device`, None for a view on the CPU; `hold(ptr, stream)` keeps a
    stream object of the consumer for the bridge, if it can be kept.
    """

    cdef readonly object source
    cdef object current, hold
    cdef uintptr_t ptr
    cdef int device

    def __cinit__(self, source, uintptr_t ptr, int device, current, hold):
        self.source = source
        self.ptr = ptr
        self.device = device
        self.current = current
        self.hold = hold

    def __del__(self):
        # The source's block may be freed right after this. During shutdown nothing is freed, so nothing need be noted.
        if self.current is None or not process.running():
            return
        handle = self.current.handle(self.device)
        if not hand_over(self.ptr, handle, NOBODY):
            self.hold(self.ptr, self.current.object(self.device))
            hand_over(self.ptr, handle, NOBODY, any_stream=True)


NOBODY = 0
CPU = 1
STREAM = 2


def hand_over(uintptr_t ptr, used, int to, uintptr_t user=0, *, bint any_stream=False):
    """Note that `used` (None: no stream) may have touched a block, and let somebody have it after all work on it.

    Parameters
    ----------
    ptr
        An address in a live block; of any other nothing is done.
    used
        The stream that the framework which has the block is on, as a handle.
    to
        `NOBODY`: it is only noted. `CPU`: wait, without the GIL. `STREAM`: order `user` after the work, and note it too.
    any_stream
        Go on with streams that the bridge does not hold.

    Returns
    -------
    bool
        False if nothing was done, since the bridge does not hold one of the streams: hold both, as far as they can be,
        and ask again with `any_stream`.
    """
    cdef CHandOver what
    cdef CUstream used_stream = NULL
    cdef CUstream user_stream = <CUstream>user
    cdef Refusal refusal = Refusal.none
    what.used = what.user = NULL
    if used is not None:
        used_stream = <CUstream><uintptr_t>used
        what.used = &used_stream
    if to == STREAM:
        what.user = &user_stream
    what.cpu = to == CPU
    what.any_stream = any_stream
    cdef HandedOver result = native_hand_over(process, <const void*>ptr, what, refusal)
    if result == HandedOver.done or result == HandedOver.not_live:
        return True
    if result == HandedOver.used_not_held or result == HandedOver.user_not_held:
        return False
    if result != HandedOver.refused:
        raise _not_recorded(used, result == HandedOver.used_capturing)
    raise _not_waited_for(ptr, refusal) if to == CPU else _not_ordered(ptr, user, refusal)


cdef object _not_recorded(uintptr_t stream, bint capturing):
    if capturing:
        return BridgeError(
            f"stream {stream:#x} cannot be recorded: it is being captured, and the bridge has not seen it before; make an "
            "array on it, or a view for it, before the capture begins"
        )
    return BridgeError(
        f"stream {stream:#x} cannot be recorded: the driver does not know it; it may have been destroyed"
    )


cdef object _not_ordered(uintptr_t ptr, uintptr_t stream, Refusal refusal):
    if refusal == Refusal.unheld_stream:
        return messages.unheld_stream(ptr)
    return BridgeError(
        f"stream {stream:#x} cannot be ordered after the work on {ptr:#x}: one of the streams is being captured, or "
        "was destroyed; make views before the capture begins"
    )


cdef object _not_waited_for(uintptr_t ptr, Refusal refusal):
    cdef CPool* pool = pool_of(process, <const void*>ptr)
    if refusal == Refusal.capturing and pool != NULL and pool.options().device_wait:
        return BridgeError(
            f"the CPU cannot have the memory at {ptr:#x} now: this device does not share managed memory with the CPU while "
            "it is busy, and waiting for all of it would destroy the capture that is going on; end the capture first"
        )
    if refusal == Refusal.capturing:
        return BridgeError(
            f"the memory at {ptr:#x} is used on a stream that is being captured: the CPU cannot wait for it; "
            "end the capture first"
        )
    if refusal == Refusal.unheld_stream:
        return messages.unheld_stream(ptr)
    return BridgeError(f"the CUDA driver failed while waiting for the work on {ptr:#x}; look at the kernels before it")
