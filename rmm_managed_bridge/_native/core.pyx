# distutils: language = c++
"""The process-wide native state (ledger, page map, history, driver) and heaps on it. See tracked_pool.hpp."""

import atexit
import itertools
import os
import threading
from contextvars import ContextVar

from rmm_managed_bridge._native import pressure, refusals
from rmm_managed_bridge.errors import BridgeError, InstallError
from rmm_managed_bridge.units import format_bytes

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject


cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX
    void PyErr_SetInterrupt()


cdef extern from "entry/interpreter.hpp" namespace "rmm_bridge" nogil:
    void connect_interpreter(CProcess* process, void (*closed)() noexcept, void (*warnings)() noexcept,
                             bool (*relieve)(size_t size_bytes, int attempt, bool may_collect) noexcept)
    void begin_exit(CProcess* process)
    void drop_relaxed(CProcess* process, PyObject* object)


cdef extern from "pool/block_calls.hpp" namespace "rmm_bridge" nogil:
    CHeap* heap_of(CProcess* process, const void* ptr)
    int current_device_of(CProcess* process)
    Freed free_block(CProcess* process, void* ptr, uint64_t stated, bool has_stream, CUstream stream, const Provenance& who)


cdef extern from "pool/pool_calls.hpp" namespace "rmm_bridge" nogil:
    bool holds_stream(CHeap* heap, CUstream stream)
    bool hold_stream(CHeap* heap, CUstream stream, void* owner) except +
    vector[void*] owners(CHeap* heap, vector[unsigned short]& lanes) except +
    void* retire_lane(CHeap* heap, unsigned short lane, bool last) except +
    CHeap* new_host_heap(CProcess* process, const PoolOptions& options, int kind, int track, int device, bool ordered) except +
    uint64_t unstated "rmm_bridge::Heap::kUnstated"


cdef extern from "entry/call_site.hpp" namespace "rmm_bridge" nogil:
    void set_internal(Origin* origin, vector[string] prefixes) except +
    Origin* new_origin(CProcess* process, object tag_variable) except +

KINDS = ("host", "managed", "system", "device", "pinned")  # tracked_pool.hpp knows the numbers of the first two
TRACKS = ("off", "counters", "sites")
PHASES = ("running", "forked", "exiting")

# Number 0 stands for "no tag". Tags are interned for the life of the process, as call sites are.
tag_variable = ContextVar("rmm_managed_bridge.tag", default=0)
_tags = [""]
_outer_tags = [0]
_tag_numbers = {}
_tag_lock = threading.Lock()
_frameworks = ["other", "numpy", "cupy", "warp", "torch", "rmm"]
_framework_numbers = {name: number for number, name in enumerate(_frameworks)}

process = new CProcess()
origin = new_origin(process, tag_variable)
process.history.set_limit(1000)


cdef uint8_t framework_number(str name) except? 255:
    number = _framework_numbers.get(name)
    if number is None:
        with _tag_lock:
            number = _framework_numbers.setdefault(name, len(_frameworks))
            if number == len(_frameworks):
                if number == 255:
                    raise BridgeError("more than 255 framework names; use one name for each framework")
                _frameworks.append(name)
    return number


def nested_tag(outer, str name, limit_bytes=None):
    """Return the number of the tag `name` inside the tag number `outer`, the same for each call with this limit."""
    origin.tags_used = True
    with _tag_lock:
        number = _tag_numbers.get((outer, name, limit_bytes))
        if number is None:
            if not process.add_budget(len(_tags), outer, -1 if limit_bytes is None else limit_bytes):
                raise BridgeError("a limit cannot be set after a million different tags; use a fixed set of names")
            number = _tag_numbers[outer, name, limit_bytes] = len(_tags)
            _tags.append(f"{_tags[outer]}/{name}" if outer else name)
            _outer_tags.append(outer)
    return number


def outer_tag(number):
    """Return the number of the tag that the tag number `number` was made inside of."""
    return _outer_tags[number]


def budgets_of(number):
    """Return [(tag, limit, live bytes)] of the budgets that the tag number `number` charges, innermost first."""
    found = []
    while number:
        budget = process.budgets.find(number)
        if budget != NULL and (budget != process.budgets.find(_outer_tags[number])):
            found.append((_tags[number], budget.limit_bytes, <int64_t>budget.live_bytes))
        number = _outer_tags[number]
    return found


def tag_name(number):
    """Return the path of the tag number `number`, as records have it."""
    return _tags[number]


def set_internal_files(prefixes):
    """Call sites in files whose names begin with one of `prefixes` are not the user's."""
    cdef vector[string] native
    for prefix in prefixes:
        native.push_back(os.fsencode(prefix))
    set_internal(origin, native)


def heap_containing(uintptr_t ptr):
    """Return the heap whose range `ptr` lies in, or None."""
    cdef CHeap* found = heap_of(process, <const void*>ptr)
    cdef Heap heap
    for heap in _heaps:
        if heap.c_heap == found:
            return heap
    return None


def phase():
    """Return "running", "forked" or "exiting"."""
    return PHASES[process.phase_number()]


def load_driver(str library="libcuda.so.1"):
    """Load the CUDA driver if there is one. Return (number of devices, why there is none)."""
    process.driver.load(library.encode())
    return (process.driver.devices if process.driver.loaded else 0), process.driver.why_not.decode()


def memory_bytes(int device):
    """Return the memory of one device; of this machine for -1."""
    cdef size_t size_bytes = 0
    if device < 0:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    process.driver.device_memory(&size_bytes, device)
    return size_bytes


def physical_bytes():
    """Return the memory of this machine and of all its devices: no pool can ever use more.

    The driver reserves address space for a managed request of any size, so something has to say no.
    """
    return memory_bytes(-1) + process.driver.total_memory()


def current_device():
    """Return the device whose context is current on this thread, or -1."""
    return current_device_of(process)


def device_attribute(int device, int attribute):
    """Return an attribute of a device (a `CUdevice_attribute` number); 0 where it cannot be asked."""
    return process.driver.attribute(device, attribute)


cdef object failure(CHeap* heap, Refusal refusal, size_t requested_bytes, uintptr_t stream):
    """The exception for an allocation that was refused."""
    if not process.running():
        return refusals.forked_or_exiting(phase(), requested_bytes)
    if refusal == Refusal.capturing:
        return refusals.capturing(requested_bytes, stream)
    if refusal == Refusal.bad_stream:
        return refusals.bad_stream(stream)
    if refusal == Refusal.over_budget:
        return refusals.over_budget(requested_bytes, budgets_of(tag_variable.get()))
    numbers = heap.numbers()
    if heap.retired() and numbers.reserved_bytes == 0:
        return refusals.closed(requested_bytes)
    return refusals.out_of_memory(
        requested_bytes, heap.live_bytes(), numbers.reserved_bytes, numbers.quarantined_bytes,
        numbers.largest_free_bytes, heap.options().limit_bytes,
    )


cdef object foreign(uintptr_t ptr, Freed freed):
    """The exception for a pointer that cannot be freed."""
    return refusals.foreign(ptr) if freed == Freed.foreign else refusals.not_live(ptr)


# Every heap that is not closed. This keeps them, and what they stand on, alive while blocks are.
_heaps = []
_generations = itertools.count(1)


def any_heap():
    """Return a heap that is not closed, or None: enough to free through, since a block goes back where it came from."""
    return _heaps[-1] if _heaps else None


def heap_serving(int device):
    """Return the newest heap on `device` that takes requests.

    Raises
    ------
    InstallError
        If there is none.
    """
    for heap in reversed(_heaps):
        if heap.device == device and not heap.retired:
            return heap
    raise InstallError(
        f"no pool of the bridge serves device {device}; call install() first, or set a ManagedBridgeResource with "
        "rmm.mr.set_per_device_resource"
    )


def heaps():
    """Return the heaps that are not closed, oldest first."""
    return list(_heaps)


def close_ended():
    """Let go of what heaps stood on that have ended: the interpreter may not have got round to it.

    See `call_soon` in interpreter.hpp.
    """
    cdef Heap heap
    for heap in list(_heaps):
        if heap.c_heap.ended():
            heap.close()


cdef class Heap:
    """One pool with its account: made by :func:`host_heap` here, or over an RMM resource in `bridge_resource`."""

    def __init__(self):
        raise TypeError("a Heap is made by host_heap() or by ManagedBridgeResource")

    cdef void attach(self, CHeap* c_heap, str kind, str track, object keep_alive):
        self.c_heap = c_heap
        self.kind = kind
        self.track = track
        self.keep_alive = keep_alive
        self.generation = next(_generations)
        _heaps.append(self)

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
        request.who = origin.capture(framework, self.c_heap.track())
        cdef void* ptr = self.c_heap.allocate(request, refusal, NULL, &held)
        if refusal != Refusal.none:
            raise failure(self.c_heap, refusal, request.bytes, stream)
        if not held and owner is not None:
            self.adopt(stream, owner)
        return <uintptr_t>ptr

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
        """Free a block of any heap. A size that is not the recorded one is reported; the recorded one counts."""
        self.give(ptr, size_bytes, stream is not None, 0 if stream is None else stream, framework_number(framework))

    def adopt(self, uintptr_t stream, owner):
        """Hold `owner`, the object whose life is the stream's. Return False if the stream is held already."""
        if not hold_stream(self.c_heap, <CUstream>stream, <void*>owner):
            return False
        Py_INCREF(owner)
        self.drop_unused_streams()
        return True

    def holds(self, uintptr_t stream):
        """Return True if the bridge holds this stream's object, or need not."""
        return holds_stream(self.c_heap, <CUstream>stream)

    def drop_unused_streams(self):
        """Let go of streams that nobody else holds and no live block names. Return how many."""
        if not process.running():
            return 0
        cdef vector[unsigned short] lanes
        cdef vector[void*] held = owners(self.c_heap, lanes)
        cdef void* dropped
        count = 0
        for i in range(held.size()):
            if (<PyObject*>held[i]).ob_refcnt > 1:
                continue
            dropped = retire_lane(self.c_heap, lanes[i], True)
            if dropped != NULL:
                Py_DECREF(<object>dropped)
                count += 1
        if count:
            self.c_heap.poll()  # lets the dropped streams' memory and numbers go where their work is finished
        return count

    def synchronize(self):
        """Wait for the work on every stream that the pool holds. Releases the GIL meanwhile."""
        cdef Refusal refusal = self.c_heap.synchronize_all()
        if refusal == Refusal.capturing:
            raise BridgeError("a stream is being captured: waiting would destroy the capture; end it first")
        if refusal != Refusal.none:
            raise BridgeError("the CUDA driver failed while waiting for a stream; look at the kernels before it")

    def trim(self):
        """Give free pieces back to upstream. Return their bytes."""
        cdef size_t given_back = self.c_heap.trim()
        if self.c_heap.retired():
            self.close()  # which found pieces reserved while this was giving them back
        return given_back

    def retire(self):
        """No more allocations are meant to come; the heap closes when its last block is gone.

        What is free goes back before: nobody will ask for it.
        """
        self.c_heap.retire()
        if self.close():
            return True
        if process.running():
            process.keeper.wake()
        return False

    def close(self):
        """Give everything back, if no block is live. Return True if that is done."""
        if self.closed:
            return True
        if not process.running() or not self.c_heap.retired() or not self.c_heap.close():
            return False
        if self.closed:  # another thread did, while this one waited for the device without the GIL
            return True
        # Before anything is let go: a destructor may come here again.
        self.closed = True
        _heaps.remove(self)
        cdef PyObject* kept
        cdef vector[unsigned short] lanes
        cdef vector[void*] held = owners(self.c_heap, lanes)
        for i in range(held.size()):
            if retire_lane(self.c_heap, lanes[i], False) != NULL:
                Py_DECREF(<object>held[i])
        kept = <PyObject*>self.keep_alive
        Py_INCREF(self.keep_alive)
        self.keep_alive = None
        drop_relaxed(process, kept)
        return True

    @property
    def retired(self):
        """True once no more allocations are meant to come."""
        return self.c_heap.retired()

    @property
    def device(self):
        return self.c_heap.device()

    @property
    def live_bytes(self):
        return self.c_heap.live_bytes()

    @property
    def live_count(self):
        return self.c_heap.live_count()

    @property
    def numbers(self):
        """Return (reserved, used, quarantined, largest free span) in bytes and the number of lanes."""
        cdef PoolNumbers numbers = self.c_heap.numbers()
        return (
            numbers.reserved_bytes, numbers.used_bytes, numbers.quarantined_bytes, numbers.largest_free_bytes,
            numbers.lane_count,
        )

    def __repr__(self):
        return (
            f"<Heap: {self.kind}, {format_bytes(self.live_bytes)} live in {self.live_count}, "
            f"{format_bytes(self.numbers[0])} reserved>"
        )


cdef PoolOptions pool_options(object options, bint hugepages, bint concurrent) except *:
    """A `config.PoolSettings`, or None for the defaults, as the native pool takes it."""
    cdef PoolOptions native
    native.hugepages = hugepages
    native.device_wait = not concurrent
    native.limit_bytes = physical_bytes()
    if options is not None:
        if options.limit_bytes is not None:
            native.limit_bytes = options.limit_bytes
        if options.release_threshold_bytes is not None:
            native.release_threshold_bytes = options.release_threshold_bytes
        if options.quarantine_limit_bytes is not None:
            native.quarantine_limit_bytes = options.quarantine_limit_bytes
        native.patience = Milliseconds(<int64_t>options.patience_ms)
        native.cautious = options.ordering == "cautious"
        native.debug = options.pool == "off"
    return native


def host_heap(*, bint hugepages=False, settings=None, str track="sites", str kind="host", int device=-1,
              bint ordered=False, bint concurrent=True):
    """Return a heap on memory from `mmap`.

    `ordered`: with the ordering of `device`, which is `concurrent` or not; for tests on a fake driver.
    """
    cdef Heap heap = Heap.__new__(Heap)
    heap.attach(
        new_host_heap(
            process, pool_options(settings, hugepages, concurrent), KINDS.index(kind), TRACKS.index(track), device, ordered
        ),
        kind, track, None,
    )
    return heap


cdef void _call_closed() noexcept with gil:
    for heap in list(_heaps):
        if heap.retired:
            heap.close()


cdef void _call_notices() noexcept with gil:
    from rmm_managed_bridge._native import notices

    notices.warn()


cdef bool _call_relieve(size_t size_bytes, int attempt, bool may_collect) noexcept with gil:
    try:
        return pressure.relieve(size_bytes, attempt, may_collect)
    except BaseException:  # Ctrl-C in the callback: it cannot pass through native code, so it is pressed once more
        PyErr_SetInterrupt()
        return False

connect_interpreter(process, _call_closed, _call_notices, _call_relieve)


def _forget_tag_lock():
    """In a forked child: a thread that held the lock is not there to let it go."""
    global _tag_lock
    _tag_lock = threading.Lock()

os.register_at_fork(after_in_child=_forget_tag_lock)


def _begin_exit():
    begin_exit(process)

# Registered when the module is first imported, so before any object that a program makes from it: exit handlers run in
# reverse, and what runs after ours finds the process already marked.
atexit.register(_begin_exit)
