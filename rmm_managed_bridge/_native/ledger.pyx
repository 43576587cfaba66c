# distutils: language = c++
"""The ledger as records: who holds what now, who held it at the peak, and what went wrong. See ledger.hpp."""

import time

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libcpp.vector cimport vector

from rmm_managed_bridge._native.process cimport (
    CProcess, CUsage, CWarning, Entry, HistoryEvent, HolderKey, SiteText, SiteTexts, process,
)


from rmm_managed_bridge._native.process import KINDS, _frameworks, _tags  # lists that only grow
from rmm_managed_bridge.errors import BridgeError
from rmm_managed_bridge.records import Allocation, CallSite, Event, History, Holder, Peak, Snapshot, Usage


cdef extern from "pool/pool_calls.hpp" namespace "rmm_bridge" nogil:
    void copy_holders(CProcess* process, vector[HolderKey]& keys, vector[CUsage]& usages) except +
    void copy_entries(CProcess* process, vector[Entry]& entries) except +


cdef extern from "pool/block_calls.hpp" namespace "rmm_bridge" nogil:
    uint32_t entry_of(CProcess* process, const void* ptr)


cdef extern from "entry/call_site.hpp" namespace "rmm_bridge":
    object new_str(const SiteText& text)

ACTIONS = ("allocate", "deallocate", "resize", "failure", "foreign_free", "size_mismatch", "damage")
WARNINGS = ("quarantine_full", "written_before", "written_behind", "written_after_free")
NATIVE = CallSite("native", 0, "")
OTHER = CallSite("other code", 0, "")  # lines for which the table of call sites had no room


@cython.final
cdef class _SiteCache:
    cdef list sites
    cdef dict names  # many lines are in one file

    def __cinit__(self):
        self.sites = [NATIVE, OTHER]  # as Sites numbers them
        self.names = {}

    cdef object name(self, const SiteText& text):
        made = new_str(text)
        return self.names.setdefault(made, made)

    cdef object get(self, uint32_t number):
        cdef SiteTexts found
        while len(self.sites) <= number:
            found = process.sites.at(<uint32_t>len(self.sites))
            self.sites.append(tuple.__new__(CallSite, (
                self.name(found.file), found.line, self.name(found.function),
                None if found.via == 0 else self.sites[found.via], found.library,
            )))  # its `via` was there before it
        return self.sites[number]

cdef _SiteCache _sites = _SiteCache()


cdef object _allocation(const Entry& entry):
    cdef HolderKey key = process.ledger.key_of(entry.holder)
    # What the class would do, in Python: half a microsecond more for each block of a snapshot.
    return tuple.__new__(Allocation, (
        entry.ptr, entry.bytes, _frameworks[key.framework], _sites.get(key.site), _tags[key.tag], key.device,
        entry.stream, entry.thread, entry.time_ns, KINDS[key.kind], entry.serial, entry.resized_count,
    ))


cdef object _holder(const HolderKey& key, int64_t size_bytes, int64_t count):
    return tuple.__new__(Holder, (
        _frameworks[key.framework], _tags[key.tag], _sites.get(key.site), key.device, KINDS[key.kind], size_bytes, count
    ))


cdef object _event(str action, const HolderKey& who, const Entry& entry, uint64_t stated_bytes):
    return Event(
        action, entry.ptr, entry.bytes, stated_bytes, _frameworks[who.framework], _tags[who.tag], _sites.get(who.site),
        who.device, entry.stream, entry.thread, entry.time_ns, entry.serial,
    )


def allocation_of(address):
    """Return the record of the live block that `address` lies in, or None."""
    cdef Entry entry
    cdef uintptr_t ptr
    try:
        ptr = address
    except OverflowError:
        return None
    cdef uint32_t number = entry_of(process, <const void*>ptr)
    if number == 0 or not process.ledger.read(number, entry):
        return None
    # The block may have been freed, and its record used again, between the two look-ups.
    if ptr < entry.ptr or ptr - entry.ptr >= (entry.bytes if entry.bytes != 0 else 1):
        return None
    return _allocation(entry)


def holders():
    """Return [(Holder, Usage, bytes at the peak, count at the peak)] for everyone who ever held memory."""
    cdef vector[HolderKey] keys
    cdef vector[CUsage] usages
    with nogil:
        copy_holders(process, keys, usages)
    result = []
    for i in range(keys.size()):
        holder = _holder(keys[i], usages[i].current_bytes, usages[i].current_count)
        usage = tuple.__new__(Usage, (
            usages[i].current_bytes, usages[i].current_count, usages[i].peak_bytes, usages[i].total_bytes,
            usages[i].total_count,
        ))
        result.append((holder, usage, usages[i].at_peak_bytes, usages[i].at_peak_count))
    return result


def peak():
    """Return who held what when the live bytes were highest."""
    at_peak = []
    for holder, _usage, size_bytes, count in holders():
        if count > 0:
            at_peak.append(holder._replace(current_bytes=size_bytes, current_count=count))
    return Peak(process.ledger.peak_bytes(), tuple(at_peak))


def snapshot():
    """Return a frozen copy of the live allocations, by serial number."""
    cdef vector[Entry] entries
    with nogil:
        copy_entries(process, entries)
    allocations = sorted([_allocation(entries[i]) for i in range(entries.size())], key=lambda a: a.serial)
    return Snapshot(
        tuple(allocations), sum(a.requested_bytes for a in allocations), peak(), time.time_ns()
    )


def history():
    """Return the newest events, oldest first."""
    cdef uint64_t dropped = 0
    cdef vector[HistoryEvent] events
    with nogil:
        events = process.history.copy(dropped)
    return History(
        tuple(
            _event(ACTIONS[<int>events[i].action], events[i].who, events[i].entry, events[i].stated_bytes)
            for i in range(events.size())
        ),
        dropped,
    )


def take_pending_warnings():
    """Return [(kind, bytes, offset, Event)] of what happened where nothing could be raised, each once."""
    cdef vector[CWarning] notices = process.warnings.take()
    return [
        (
            WARNINGS[<int>notices[i].kind], notices[i].bytes, notices[i].offset,
            _event("damage", notices[i].who, notices[i].entry, 0),
        )
        for i in range(notices.size())
    ]


def set_history(size_t limit, bint every_event):
    """Keep the newest `limit` events: failures and wrong frees, or every allocation and free as well."""
    process.history.set_limit(limit)
    process.record_all_events(every_event)


def current_bytes():
    """Return the live bytes of all pools."""
    return process.ledger.current_bytes()


def counters():
    """Return (current bytes, peak bytes, foreign frees, size mismatches, failures, ledger bytes, damaged blocks)."""
    return (
        process.ledger.current_bytes(), process.ledger.peak_bytes(), process.foreign_free_count(),
        process.size_mismatch_count(), process.failure_count(),
        process.ledger.overhead_bytes() + process.sites.overhead_bytes(), process.warnings.damaged_count(),
    )


def reset_peak():
    """The peak starts again from what is live now."""
    process.ledger.reset_peak()


def open_peak_scope():
    """Start a peak of its own and return its number."""
    cdef int scope = process.ledger.open_scope()
    if scope < 0:
        raise BridgeError("64 peak scopes are open; leave one before entering another")
    return scope


def read_peak_scope(int scope):
    """Return the highest live bytes since the scope was opened."""
    return process.ledger.read_scope(scope)


def close_peak_scope(int scope):
    """End a peak scope; its number may be given out again."""
    process.ledger.close_scope(scope)
