# distutils: language = c++
"""What was asked of the driver about live blocks, and the scope that driver calls are made in. See hint_table.hpp."""

from libc.stddef cimport size_t
from libc.stdint cimport int16_t, uint8_t, uint64_t, uintptr_t
from libcpp cimport bool

from rmm_managed_bridge._native.process cimport CProcess, CUstream, Refusal, process


cdef extern from "pool/hint_calls.hpp" namespace "rmm_bridge" nogil:
    cdef cppclass Hinted:
        uintptr_t low
        uintptr_t high
        uint64_t accessors
        uint8_t advice
        int16_t placement

    cdef cppclass DriverScope:
        pass

    bool note_advice(CProcess* process, const void* ptr, uintptr_t low, uintptr_t high, uint8_t advice,
                     uint64_t accessors) except +
    bool note_placement(CProcess* process, const void* ptr, int16_t placement) except +
    void take_back_advice(CProcess* process, const void* ptr, uintptr_t low, uintptr_t high, uint8_t advice,
                          uint64_t accessors)
    Hinted hints_of(CProcess* process, const void* ptr)
    size_t count_sharing(CProcess* process, const void* ptr, uintptr_t low, uintptr_t high)
    Refusal stream_state(CProcess* process, const void* ptr, CUstream stream)
    DriverScope* open_scope(CProcess* process, const void* ptr) except +
    void set_least_hinted(CProcess* process, size_t size_bytes)
    void set_least_prefetched(CProcess* process, size_t size_bytes)
    uint64_t take_count(CProcess* process, int outcome)
    const int kOutcomes "rmm_bridge::NewBlocks::kOutcomes"

READ_MOSTLY = 1
PREFERRED = 2
CPU = -1
NOWHERE = -2
NOBODY = ()
# As `NewBlocks::Outcome` has them: done, or a name of `HintSkip`.
_OUTCOMES = ("DONE", "HOST", "NOT_MANAGED", "NO_CONCURRENT_ACCESS", "CAPTURING", "LARGER_THAN_DEVICE", "REFUSED")


cdef uint64_t bits_of(accessors) except? 0:
    cdef uint64_t bits = 0
    for place in accessors:
        if not CPU <= place < 63:
            raise ValueError(f"device {place} is not between 0 and 62")
        bits |= <uint64_t>1 << (63 if place == CPU else <int>place)
    return bits


def note(uintptr_t ptr, uintptr_t low, uintptr_t high, uint8_t advice, accessors=NOBODY):
    """Note that pages of the block at `ptr` are advised, before the driver is told; its free undoes it.

    `advice` is of READ_MOSTLY and PREFERRED, `accessors` are devices and CPU. Return False if no live block is there.
    """
    return note_advice(process, <const void*>ptr, low, high, advice, bits_of(accessors))


def take_back(uintptr_t ptr, uintptr_t low, uintptr_t high, uint8_t advice, accessors=NOBODY):
    """Note that advice was undone; that counts if it was undone on all pages of the block that had it."""
    take_back_advice(process, <const void*>ptr, low, high, advice, bits_of(accessors))


def place(uintptr_t ptr, int16_t placement):
    """Note where the block was last asked to be: a device or CPU. Return False if no live block is there."""
    return note_placement(process, <const void*>ptr, placement)


def hints_at(uintptr_t ptr):
    """Return (low, high, advice, accessors, placement) of the live block at `ptr`; NOWHERE if it was never placed."""
    cdef Hinted found = hints_of(process, <const void*>ptr)
    accessors = tuple([place for place in range(-1, 63) if found.accessors >> (63 if place == CPU else place) & 1])
    return found.low, found.high, found.advice, accessors, found.placement


def sharing(uintptr_t ptr, uintptr_t low, uintptr_t high):
    """Return how many other live blocks have bytes on the pages [low, high) around the block at `ptr`."""
    return count_sharing(process, <const void*>ptr, low, high)


def state_of_stream(uintptr_t ptr, uintptr_t stream):
    """Return "ready", "capturing" or "unknown": what the stream is for work on the block at `ptr` now."""
    cdef Refusal refusal = stream_state(process, <const void*>ptr, <CUstream>stream)
    return "ready" if refusal == Refusal.none else "capturing" if refusal == Refusal.capturing else "unknown"


def set_least_bytes(size_bytes):
    """Blocks of GPU frameworks below this size are not reported to the hint policy; None: no block is."""
    set_least_hinted(process, <size_t>-1 if size_bytes is None else <size_t>size_bytes)


def prefetch_new_blocks(size_bytes):
    """Blocks that RMM and PyTorch make on a stream are prefetched from this size on; None: none is."""
    set_least_prefetched(process, <size_t>-1 if size_bytes is None else <size_t>size_bytes)


def take_new_block_counts():
    """Return {outcome: count} of such blocks since the last call: "DONE", or the name of the `HintSkip`. Those that are not 0."""
    counts = [(name, take_count(process, outcome)) for name, outcome in zip(_OUTCOMES, range(kOutcomes), strict=True)]
    return {name: count for name, count in counts if count}


cdef class driver_scope:
    """While inside, the context of the block's pool is current on this thread and its capture mode is relaxed.

    So that nothing called here breaks a capture in global mode. Not to be shared by threads.
    """

    cdef uintptr_t ptr
    cdef DriverScope* scope

    def __cinit__(self, uintptr_t ptr):
        self.ptr = ptr
        self.scope = NULL

    def __enter__(self):
        self.scope = open_scope(process, <const void*>self.ptr)
        return self

    def __exit__(self, *error):
        del self.scope
        self.scope = NULL
