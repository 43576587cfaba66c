# distutils: language = c++
"""What the whole process shares, once: driver, tags, names of frameworks, whether it may still act. See process.hpp."""

import atexit
import os
import threading
from contextvars import ContextVar

from rmm_managed_bridge.errors import BridgeError

from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "entry/interpreter.hpp" namespace "rmm_bridge" nogil:
    void begin_exit(CProcess* process)


cdef extern from "pool/block_calls.hpp" namespace "rmm_bridge" nogil:
    int current_device_of(CProcess* process)


cdef extern from "pool/fork_copy.hpp" namespace "rmm_bridge" nogil:
    cdef cppclass ForkOptions:
        uint64_t limit_bytes
        Milliseconds patience
        Milliseconds keep

    cdef enum class ForkOutcome "rmm_bridge::ForkReport::Outcome"(int):
        nothing

    cdef enum class ForkWhy "rmm_bridge::ForkReport::Why"(int):
        nothing

    cdef cppclass ForkReport:
        ForkOutcome outcome
        size_t block_count
        size_t block_bytes
        size_t copied_bytes
        size_t left_out_count
        size_t left_out_bytes
        uintptr_t left_out
        ForkWhy why
        int64_t time_ns

    ForkReport native_copy_for_fork "rmm_bridge::copy_for_fork"(CProcess* process, const ForkOptions& options)
    void native_end_fork "rmm_bridge::end_fork"(CProcess* process, Milliseconds keep)
    bool native_lost_in_fork "rmm_bridge::lost_in_fork"(CProcess* process, const void* ptr, size_t size_bytes)


cdef extern from "pool/pool_calls.hpp" namespace "rmm_bridge" nogil:
    CProcess* new_process() except +


cdef extern from "entry/call_site.hpp" namespace "rmm_bridge" nogil:
    void set_rules(
        Origin* origin, const vector[string]& program, const vector[string]& library, const vector[string]& hidden
    ) except +
    Origin* new_origin(CProcess* process, object tag_variable) except +

KINDS = ("host", "managed", "system", "device", "pinned")  # tracked_pool.hpp knows the numbers of the first two
TRACKS = ("off", "counters", "sites")
PHASES = ("running", "forked", "exiting")
FORK_OUTCOMES = ("nothing", "copied", "too large", "no memory", "busy")  # as in fork_copy.hpp, as the next one
FORK_REASONS = ("", "not finished", "capturing", "unheld stream", "driver", "exclusive")

# Number 0 stands for "no tag". Tags are interned for the life of the process, so there is an end to them: a program that names
# each of its requests has the rest under one name in each tag.
MOST_TAGS = 1 << 16
OTHER_TAGS = "(other tags)"
tag_variable = ContextVar("rmm_managed_bridge.tag", default=0)
_tags = [""]
_outer_tags = [0]
_tag_numbers = {}
_tag_lock = threading.Lock()
_frameworks = ["other", "numpy", "cupy", "warp", "torch", "rmm"]
_framework_numbers = {name: number for number, name in enumerate(_frameworks)}

process = new_process()
origin = new_origin(process, tag_variable)
process.limits.find(b"/proc", b"/sys/fs/cgroup")
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
                _record_name(TextKind.framework, number, 0, name)
    return number


cdef _record_name(TextKind kind, number, outer, str name):
    cdef CRecording* file = process.recording.load()
    if file != NULL:
        file.name(kind, number, outer, name.encode("utf-8", "surrogatepass"))


def nested_tag(outer, str name, limit_bytes=None):
    """Return the number of the tag `name` inside the tag number `outer`, the same for each call with this limit.

    It is not less than `MOST_TAGS` where there are so many that this one has no name of its own.
    """
    origin.tags_used = True
    with _tag_lock:
        number = _tag_numbers.get((outer, name, limit_bytes))
        if number is None and limit_bytes is None and len(_tags) >= MOST_TAGS:
            name = OTHER_TAGS
            number = _tag_numbers.get((outer, name, None))
        if number is None:
            if not process.add_budget(len(_tags), outer, -1 if limit_bytes is None else limit_bytes):
                raise BridgeError("a limit cannot be set after a million different tags; use a fixed set of names")
            number = _tag_numbers[outer, name, limit_bytes] = len(_tags)
            path = f"{_tags[outer]}/{name}" if outer else name
            _tags.append(_tags[outer] if name == OTHER_TAGS and _tags[outer].endswith(OTHER_TAGS) else path)
            _outer_tags.append(outer)
            _record_name(TextKind.tag, number, outer, _tags[number])
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


cdef vector[string] _utf32(names) except *:
    cdef vector[string] native
    for name in names:
        native.push_back(name.encode("utf-32-le", "surrogatepass"))
    return native


def set_file_rules(program=(), library=(), hidden=()):
    """Say whose files are that begin with one of these: the longest that fits. Call sites name the program's lines.

    Files below a folder site-packages or dist-packages are libraries', if nothing longer fits, and all others the
    program's. What is hidden is no place at all.
    """
    set_rules(origin, _utf32(program), _utf32(library), _utf32(hidden))


def phase():
    """Return "running", "forked" or "exiting"."""
    return PHASES[process.phase_number()]


def is_child():
    """Return True in a process that was forked from one with pools, or with the CUDA driver loaded."""
    return process.is_child()


def begin_again():
    """In a forked child: it is about to make pools of its own. CUDA stays off where the parent had the driver loaded."""
    process.begin_again()


def load_driver(str library="libcuda.so.1"):
    """Load the CUDA driver if there is one. Return (number of devices, why there is none)."""
    if process.parent_had_driver():
        return 0, (
            "this process was forked from one that had the CUDA driver loaded, which does not survive a fork (start workers "
            "with the 'spawn' or 'forkserver' method)"
        )
    process.driver.load(library.encode())
    return (process.driver.devices if process.driver.loaded else 0), process.driver.why_not.decode()


def memory_bytes(int device):
    """Return the memory of one device; of this machine for -1."""
    cdef size_t size_bytes = 0
    if device < 0:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    process.driver.device_memory(&size_bytes, device)
    return size_bytes


def find_limits(proc="/proc", groups="/sys/fs/cgroup"):
    """Look up the control groups of this process, below folders that stand for these two."""
    process.limits.find(os.fsencode(proc), os.fsencode(groups))


def memory_limit():
    """Return (bytes, who says so) of the least limit on this process's memory, as it is now; (None, "") without one."""
    cdef CLimit limit = process.limits.smallest()
    if limit.who == LimitedBy.nobody:
        return None, ""
    if limit.who == LimitedBy.group:
        return limit.bytes, os.fsdecode(limit.file)
    return limit.bytes, "ulimit -v" if limit.who == LimitedBy.address_space else "ulimit -d"


def processors():
    """Return how many threads of this process can run at once."""
    return process.limits.processors()


def memory_pressure():
    """Return (bytes that should go back before the kernel ends somebody, whether to look again soon)."""
    cdef CPressure pressure = process.limits.look()
    return pressure.excess_bytes, pressure.near


def allowed_bytes():
    """Return what this process may have of this machine's memory."""
    limit, _ = memory_limit()
    return memory_bytes(-1) if limit is None else min(limit, memory_bytes(-1))


def physical_bytes():
    """Return what this process may have of this machine's memory, and that of all its devices: no pool can use more.

    The driver reserves address space for a managed request of any size, so something has to say no.
    """
    return allowed_bytes() + process.driver.total_memory()


def current_device():
    """Return the device whose context is current on this thread, or -1."""
    return current_device_of(process)


def device_attribute(int device, int attribute):
    """Return an attribute of a device (a `CUdevice_attribute` number); 0 where it cannot be asked."""
    return process.driver.attribute(device, attribute)


def budget_counters():
    """Return (pieces and parts that went back to upstream, growth that passed a pool's budget)."""
    return process.given_back_count(), process.beyond_budget_count()


def populate_counters():
    """Return (prefetches of pages that no block had had, their bytes)."""
    return process.populated_count(), process.populated_byte_count()


def copy_for_fork(uint64_t limit_bytes, int patience_ms):
    """Copy what a forked child shall find of managed memory. Call `end_fork` after the fork, on the same thread.

    Returns (outcome, blocks that the CPU uses, their bytes, bytes that were copied, blocks left out, their bytes, the address of
    the first, why it was).
    """
    cdef ForkOptions options
    options.limit_bytes = limit_bytes
    options.patience = Milliseconds(patience_ms)
    cdef ForkReport report = native_copy_for_fork(process, options)
    return (
        FORK_OUTCOMES[<int>report.outcome], report.block_count, report.block_bytes, report.copied_bytes, report.left_out_count,
        report.left_out_bytes, report.left_out, FORK_REASONS[<int>report.why],
    )


def end_fork(int keep_ms):
    """In the parent, after `copy_for_fork` and a fork: the copies stay so long, for the next one."""
    native_end_fork(process, Milliseconds(keep_ms))


def lost_in_fork(uintptr_t ptr, size_t size_bytes):
    """Return True in a forked child for bytes of its parent's managed memory that it has not got."""
    return native_lost_in_fork(process, <const void*>ptr, size_bytes)


def fork_counters():
    """Return (forks before which was copied, what their children were given, what of it was copied, nanoseconds)."""
    cdef CForks* forks = &process.forks
    return <uint64_t>forks.count, <uint64_t>forks.bytes, <uint64_t>forks.copied_bytes, <uint64_t>forks.time_ns


def hugepage_counters():
    """Return (bytes that carry advice now, calls of `madvise`, how many of them failed)."""
    cdef HugepageAdvice* advice = &process.hugepages
    return <int64_t>advice.advised_bytes, <uint64_t>advice.calls, <uint64_t>advice.failures


def ask_instead_of_madvise(uintptr_t function):
    """For tests: call this C function, with the arguments of `madvise`, instead of the kernel's. 0: the kernel's."""
    process.hugepages.ask_instead(<Madvise>function)


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
