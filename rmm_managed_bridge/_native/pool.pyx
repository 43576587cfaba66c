# distutils: language = c++
"""Pools, each with its account. See tracked_pool.hpp."""

import itertools
import os

from rmm_managed_bridge._native import messages, pressure
from rmm_managed_bridge._native.ledger import holders, take_pending_warnings
from rmm_managed_bridge._native.process import KINDS, TRACKS, budgets_of, memory_limit, phase, physical_bytes, tag_variable
from rmm_managed_bridge.errors import BridgeError, InstallError
from rmm_managed_bridge.units import format_bytes

from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libcpp cimport bool
from libcpp.vector cimport vector

from rmm_managed_bridge._native.process cimport (
    CProcess, CUstream, DevicePools, Milliseconds, Origin, PoolNumbers, Provenance, Request, Side, Stalled, framework_number,
    kDevices, origin, process,
)


cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX
    void PyErr_SetInterrupt()


cdef extern from "entry/interpreter.hpp" namespace "rmm_bridge" nogil:
    void connect_interpreter(CProcess* process, void (*closed)() noexcept, void (*warnings)() noexcept,
                             bool (*relieve)(size_t size_bytes, int attempt, bool may_collect) noexcept)
    void drop_relaxed(CProcess* process, PyObject* object)


cdef extern from "entry/python_allocate.hpp" namespace "rmm_bridge" nogil:
    void* allocate_with_site(CPool* pool, Origin* origin, uint8_t framework, Request request, Refusal& refusal,
                             bool* held) noexcept


cdef extern from "pool/block_calls.hpp" namespace "rmm_bridge" nogil:
    CPool* pool_of(CProcess* process, const void* ptr)
    bool holds_stream(CPool* pool, CUstream stream)
    Freed free_block(CProcess* process, void* ptr, uint64_t stated, bool has_stream, CUstream stream, const Provenance& who)


cdef extern from "pool/pool_calls.hpp" namespace "rmm_bridge" nogil:
    bool hold_stream(CPool* pool, CUstream stream, void* owner) except +
    vector[void*] owners(CPool* pool, vector[unsigned short]& lanes) except +
    bool owns_lane(CPool* pool, unsigned short lane, void* owner)
    void* retire_lane(CPool* pool, unsigned short lane, void* owner, bool last) except +
    CPool* new_host_pool(CProcess* process, const PoolOptions& options, int kind, int track, int device, bool ordered) except +
    uint64_t unstated "rmm_bridge::TrackedPool::kUnstated"


def pool_containing(uintptr_t ptr):
    """Return the pool whose range `ptr` lies in, or None."""
    cdef CPool* found = pool_of(process, <const void*>ptr)
    cdef Pool pool
    for pool in _pools:
        if pool.c_pool == found:
            return pool
    return None


cdef object failure(CPool* pool, Refusal refusal, size_t requested_bytes, uintptr_t stream):
    """The exception for an allocation that was refused."""
    if not process.running() or pool.inherited():
        return messages.forked_or_exiting("forked" if process.running() else phase(), requested_bytes)
    if refusal == Refusal.capturing:
        return messages.capturing(requested_bytes, stream)
    if refusal == Refusal.bad_stream:
        return messages.bad_stream(stream)
    if refusal == Refusal.other_device:
        return messages.other_device(stream, pool.other_device(<CUstream>stream), pool.device())
    if refusal == Refusal.over_budget:
        return messages.over_budget(requested_bytes, budgets_of(tag_variable.get()))
    if refusal == Refusal.host_function:
        return messages.in_host_function(requested_bytes)
    cdef Stalled stalled = pool.stalled()
    if refusal == Refusal.timed_out:
        return messages.timed_out(
            requested_bytes, <uintptr_t>stalled.stream, <uintptr_t>stalled.block, stalled.bytes, pool.numbers().reserved_bytes,
        )
    numbers = pool.numbers()
    if pool.retired() and numbers.reserved_bytes == 0:
        return messages.closed(requested_bytes)
    return messages.out_of_memory(
        holders(), requested_bytes, pool.live_bytes(), numbers.reserved_bytes, numbers.quarantined_bytes,
        numbers.largest_free_bytes, pool.options().limit_bytes,
        messages.who_refused(
            pool.refused_by().decode(errors="replace"), requested_bytes > pool.options().limit_bytes - min(
                pool.options().limit_bytes, numbers.reserved_bytes
            ), pool.options().limit_bytes == physical_bytes(), *memory_limit(),
        ),
    )


cdef object foreign(uintptr_t ptr, Freed freed):
    """The exception for a pointer that cannot be freed."""
    return messages.foreign(ptr) if freed == Freed.foreign else messages.not_live(ptr)


# Every pool that is not closed. This keeps them, and what they stand on, alive while blocks are.
_pools = []
_inherited = []  # those of the process that this was forked from; they are left as they are
_numbers = itertools.count(1)


def _leave_pools_to_parent():
    """In a forked child."""
    _inherited.extend(_pools)
    _pools.clear()


os.register_at_fork(after_in_child=_leave_pools_to_parent)


def any_pool():
    """Return a pool that is not closed, or None: enough to free through, since a block goes back where it came from."""
    return _pools[-1] if _pools else _inherited[-1] if _inherited else None


def pool_serving(int device):
    """Return the newest pool on `device` that takes requests.

    Raises
    ------
    InstallError
        If there is none.
    """
    for pool in reversed(_pools):
        if pool.device == device and not pool.retired:
            return pool
    raise InstallError(
        f"no pool of the bridge serves device {device}; call install() first, or set a ManagedBridgeResource with "
        "rmm.mr.set_per_device_resource"
    )


def pools():
    """Return the pools that are not closed, oldest first."""
    return list(_pools)


def close_ended():
    """Let go of what pools stood on that have ended: the interpreter may not have got round to it.

    See `call_soon` in interpreter.hpp.
    """
    cdef Pool pool
    for pool in list(_pools):
        if pool.c_pool.over():
            pool.close()


cdef class Pool:
    """One pool with its account: made by :func:`host_pool` here, or over an RMM resource in `rmm_resource`."""

    def __init__(self):
        raise TypeError("a Pool is made by host_pool() or by ManagedBridgeResource")

    cdef void attach(self, CPool* c_pool, str kind, str track, object keep_alive):
        self.c_pool = c_pool
        self.kind = kind
        self.track = track
        self.keep_alive = keep_alive
        self.number = next(_numbers)
        _pools.append(self)

    cdef uintptr_t take(self, object size_bytes, size_t alignment, bint cpu, bint ordered, uintptr_t stream,
                        uint8_t framework, object owner) except? 0:
        """`owner`: the object whose life is the stream's, held from its first block on; None if nobody knows it."""
        cdef bool held = True
        cdef Request request
        cdef Refusal refusal = Refusal.none
        cdef Py_ssize_t asked
        try:
            asked = size_bytes
        except OverflowError:
            asked = PY_SSIZE_T_MAX if size_bytes > 0 else -1
        if asked < 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes; a size is 0 or more")
        if alignment == 0 or alignment & (alignment - 1) or alignment > (1 << 18):
            raise ValueError(f"alignment {alignment} is not a power of two up to 262144")
        request.bytes = asked
        request.alignment = alignment
        request.side = Side.cpu if cpu else Side.gpu
        request.host_ordered = not ordered
        request.may_collect = True
        request.stream = <CUstream>stream
        cdef void* ptr = allocate_with_site(self.c_pool, origin, framework, request, refusal, &held)
        if refusal != Refusal.none:
            raise failure(self.c_pool, refusal, request.bytes, stream)
        if not held and owner is not None:
            self.hold(stream, owner)
        return <uintptr_t>ptr

    cdef bint acts(self):
        """False also for a pool of the process that this was forked from."""
        return process.running() and not self.c_pool.inherited()

    cdef int give(self, uintptr_t ptr, object size_bytes, bint ordered, uintptr_t stream, uint8_t framework) except -1:
        cdef Provenance who
        cdef uint64_t stated = unstated
        if size_bytes is not None:
            if size_bytes < 0:
                raise ValueError(f"cannot free {size_bytes} bytes; a size is 0 or more, and nothing was freed")
            try:
                stated = <uint64_t>size_bytes
            except OverflowError:
                stated = unstated - 1
        who.site = who.tag = 0
        who.framework = framework
        cdef Freed freed = free_block(process, <void*>ptr, stated, ordered, <CUstream>stream, who)
        if freed == Freed.foreign or freed == Freed.not_live:
            raise foreign(ptr, freed)
        return 0

    def allocate(self, size_bytes, *, size_t alignment=256, stream=None, owner=None, bint cpu=False,
                 str framework="other"):
        """Return the address of a block; 0 for no bytes. Without `stream` the block is host-ordered.

        `owner` is the object whose life is the stream's: it is held as long as blocks may name the stream.
        """
        return self.take(
            size_bytes, alignment, cpu, stream is not None, 0 if stream is None else stream,
            framework_number(framework), owner,
        )

    def deallocate(self, uintptr_t ptr, size_bytes=None, *, stream=None, str framework="other"):
        """Free a block of any pool. A size that is not the recorded one is reported; the recorded one counts."""
        self.give(ptr, size_bytes, stream is not None, 0 if stream is None else stream, framework_number(framework))

    def hold(self, uintptr_t stream, owner):
        """Hold `owner`, the object whose life is the stream's. Return False if the stream is held already."""
        if not hold_stream(self.c_pool, <CUstream>stream, <void*>owner):
            return False
        Py_INCREF(owner)
        self.drop_unused_streams()
        return True

    def holds(self, uintptr_t stream):
        """Return True if the bridge holds this stream's object, or need not."""
        return holds_stream(self.c_pool, <CUstream>stream)

    def drop_unused_streams(self):
        """Let go of streams that nobody else holds and no live block names. Return how many."""
        if not self.acts():
            return 0
        cdef vector[unsigned short] lanes
        cdef vector[void*] held = owners(self.c_pool, lanes)
        cdef void* dropped
        count = 0
        for i in range(held.size()):
            # The lane's reference keeps it alive, and is let go by threads with the GIL only. But a destructor, or a call that
            # let go of the GIL, may have come between: then it may be gone, and the lane another's.
            if not owns_lane(self.c_pool, lanes[i], held[i]) or (<PyObject*>held[i]).ob_refcnt > 1:
                continue
            dropped = retire_lane(self.c_pool, lanes[i], held[i], True)
            if dropped != NULL:
                Py_DECREF(<object>dropped)
                count += 1
        if count:
            self.c_pool.poll()  # lets the dropped streams' memory and numbers go where their work is finished
        return count

    def synchronize(self):
        """Wait for the work on every stream that the pool holds. Releases the GIL meanwhile."""
        cdef Refusal refusal = self.c_pool.synchronize_all()
        if refusal == Refusal.capturing:
            raise BridgeError("a stream is being captured: waiting would destroy the capture; end it first")
        if refusal != Refusal.none:
            raise BridgeError("the CUDA driver failed while waiting for a stream; look at the kernels before it")

    def trim(self):
        """Give free pieces back to upstream. Return their bytes."""
        cdef size_t given_back = self.c_pool.trim()
        if self.c_pool.retired():
            self.close()  # which found pieces reserved while this was giving them back
        return given_back

    def retire(self):
        """No more allocations are meant to come; the pool closes when its last block is gone.

        What is free goes back before: nobody will ask for it.
        """
        self.c_pool.retire()
        if self.close():
            return True
        if self.acts():
            process.background.wake()
        return False

    def close(self):
        """Give everything back, if no block is live. Return True if that is done."""
        if self.closed:
            return True
        if not self.acts() or not self.c_pool.retired() or not self.c_pool.close():
            return False
        if self.closed:  # another thread did, while this one waited for the device without the GIL
            return True
        # Before anything is let go: a destructor may come here again.
        self.closed = True
        _pools.remove(self)
        cdef PyObject* kept
        cdef void* dropped
        cdef vector[unsigned short] lanes
        cdef vector[void*] held = owners(self.c_pool, lanes)
        for i in range(held.size()):
            dropped = retire_lane(self.c_pool, lanes[i], held[i], False)
            if dropped != NULL:
                Py_DECREF(<object>dropped)
        kept = <PyObject*>self.keep_alive
        Py_INCREF(self.keep_alive)
        self.keep_alive = None
        drop_relaxed(process, kept)
        return True

    @property
    def retired(self):
        """True once no more allocations are meant to come."""
        return self.c_pool.retired()

    @property
    def device(self):
        return self.c_pool.device()

    @property
    def live_bytes(self):
        return self.c_pool.live_bytes()

    @property
    def live_count(self):
        return self.c_pool.live_count()

    @property
    def numbers(self):
        """Return (reserved, used, quarantined, largest free span) in bytes, the number of lanes, and the bytes that are
        free in slabs and in pieces that cannot go back.
        """
        cdef PoolNumbers numbers = self.c_pool.numbers()
        return (
            numbers.reserved_bytes, numbers.used_bytes, numbers.quarantined_bytes, numbers.largest_free_bytes,
            numbers.lane_count, numbers.slab_free_bytes, numbers.pinned_bytes,
        )

    def __repr__(self):
        return (
            f"<Pool: {self.kind}, {format_bytes(self.live_bytes)} live in {self.live_count}, "
            f"{format_bytes(self.numbers[0])} reserved>"
        )


cdef PoolOptions pool_options(object options, bint hugepages, bint concurrent, bint devices) except *:
    """A `config.PoolSettings`, or None for the defaults, as the native pool takes it.

    `devices`: the driver gives the memory, and reserves address space for a request of any size. So something has to
    say no; the kernel does so by itself.
    """
    cdef PoolOptions native
    native.hugepages = hugepages
    native.device_wait = not concurrent
    native.budget = True
    if devices:
        native.limit_bytes = physical_bytes()
    if options is not None:
        native.budget = options.retain == "budget"
        native.least_budget_bytes = options.least_budget_bytes
        native.spare_bytes = options.spare_bytes
        if options.recent_ms is not None:
            native.recent = Milliseconds(<int64_t>options.recent_ms)
        if options.limit_bytes is not None:
            native.limit_bytes = options.limit_bytes
        if options.release_threshold_bytes is not None:
            native.release_threshold_bytes = options.release_threshold_bytes
        if options.quarantine_limit_bytes is not None:
            native.quarantine_limit_bytes = options.quarantine_limit_bytes
        native.wait_timeout = Milliseconds(<int64_t>options.wait_timeout_ms)
        native.patience = Milliseconds(<int64_t>options.patience_ms)
        native.cautious = options.ordering == "cautious"
        native.debug = options.pool == "debug"
        native.populate = options.populate
    return native


def host_pool(*, bint hugepages=False, settings=None, str track="sites", str kind="host", int device=-1,
              bint ordered=False, bint concurrent=True):
    """Return a pool on memory from `mmap`.

    `ordered`: with the ordering of `device`, which is `concurrent` or not; for tests on a fake driver.
    """
    cdef Pool pool = Pool.__new__(Pool)
    pool.attach(
        new_host_pool(
            process, pool_options(settings, hugepages, concurrent, ordered), KINDS.index(kind), TRACKS.index(track),
            device, ordered,
        ),
        kind, track, None,
    )
    return pool


cdef void _call_closed() noexcept with gil:
    for pool in list(_pools):
        if pool.retired:
            pool.close()


cdef void _call_warnings() noexcept with gil:
    messages.warn(take_pending_warnings())


cdef bool _call_relieve(size_t size_bytes, int attempt, bool may_collect) noexcept with gil:
    try:
        return pressure.relieve(size_bytes, attempt, may_collect)
    except BaseException:  # Ctrl-C in the callback: it cannot pass through native code, so it is pressed once more
        PyErr_SetInterrupt()
        return False

connect_interpreter(process, _call_closed, _call_warnings, _call_relieve)


def failure_of(Pool pool, int refusal, size_t requested_bytes, uintptr_t stream):
    """Return the exception for an allocation that an entry point was refused."""
    return failure(pool.c_pool, <Refusal>refusal, requested_bytes, stream)


cdef int use(DevicePools& pools, int device, Pool pool) except -1:
    """Let blocks for `device` come from `pool` at an entry point; from none with None."""
    if not 0 <= device < kDevices:
        raise ValueError(f"device {device} is not between 0 and {kDevices - 1}")
    pools[device].store(<CPool*>NULL if pool is None else pool.c_pool)
    return 0


cdef bint serves(DevicePools& pools, int device) noexcept:
    if not 0 <= device < kDevices:
        return False
    cdef CPool* pool = pools[device].load()
    return pool != NULL and not pool.retired()
