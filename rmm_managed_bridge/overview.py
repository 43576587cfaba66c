"""Who holds the memory: counters, records and events of all pools, and what is installed."""

import operator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from rmm_managed_bridge._native import blocks, ledger, messages, recorded
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge._native.recorded import RECORD_IT, as_recorded
from rmm_managed_bridge.arrays.address import address_of, lost_in_fork
from rmm_managed_bridge.errors import BridgeError, ConfigError, shown, warn_user
from rmm_managed_bridge.frameworks.numpy_handlers import foreign_handler
from rmm_managed_bridge.hints import counters
from rmm_managed_bridge.records import Allocation, Generation, History, Hugepages, Records, Snapshot, Stats, Status
from rmm_managed_bridge.units import format_bytes

_LONGEST_HISTORY = 10_000_000  # 130 bytes each

NOT_INSTALLED = Status(
    installed=False, backend=None, reason="", devices=(), frameworks={}, numpy_scope=None, track="sites"
)

_current: Status = NOT_INSTALLED


def note_installed(now: Status) -> None:
    """Let reports say what is installed from now on. Called by `install` alone, under its lock."""
    global _current
    _current = now
    if now.installed:
        recorded.track = now.track


class peak_scope:  # noqa: N801 - used like a function, as `tag`
    """Measure the highest live bytes inside the block, whatever is measured or reset outside. Nests, up to 64 deep.

    Attributes
    ----------
    peak_bytes : int
        The highest live bytes of the process since the block was entered; inside the block, until now. Exact while one
        thread allocates, and for blocks of 1 MiB and more; with several threads it may be off by 256 KiB.

    Examples
    --------
    >>> with bridge.peak_scope() as scope:
    ...     x = np.ones(1 << 20)
    ...     del x
    >>> scope.peak_bytes >= 8 << 20
    True
    """

    def __init__(self) -> None:
        self._scope: int | None = None
        self._result = 0

    def __enter__(self) -> Self:
        if self._scope is not None:
            raise ConfigError("this peak scope is entered already; make one for each block")
        self._scope = ledger.open_peak_scope()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scope, self._scope = self._scope, None
        if scope is None:
            raise ConfigError("this peak scope was never entered; write `with peak_scope() as scope:`")
        self._result = ledger.read_peak_scope(scope)
        ledger.close_peak_scope(scope)

    def __repr__(self) -> str:
        return f"<peak_scope: {format_bytes(self.peak_bytes)}>"

    @property
    def peak_bytes(self) -> int:
        return self._result if self._scope is None else ledger.read_peak_scope(self._scope)


def allocation_of(x: Any) -> Allocation | None:
    """Return the record of the live block that `x` lies in, or None if it is not in a block of the bridge.

    Parameters
    ----------
    x
        An array of any framework, or a view of one; anything with ``__cuda_array_interface__`` or
        ``__array_interface__``; an `rmm.DeviceBuffer`; or an address, also one inside a block.

    Returns
    -------
    Allocation or None

    Raises
    ------
    ViewError
        If `x` has no address.
    BridgeError
        In a forked child, if the memory of `x` stayed with the parent. A block that the child has is None: it is not
        recorded there.

    Warns
    -----
    BridgeWarning
        If `x` is in a block of which nothing was recorded: ``install(track="off")``.

    Examples
    --------
    >>> with bridge.tag("load"):
    ...     x = np.ones(1 << 20)
    >>> bridge.allocation_of(x[100:]).tag
    'load'
    >>> print(bridge.allocation_of(0))
    None
    """
    ptr = address_of(x).ptr
    found = ledger.allocation_of(ptr)
    if found is None and (block := blocks.find(ptr)) is None:
        return None
    if found is None and block is not None and (lost := lost_in_fork(x, ptr, 1)) is not None:
        raise BridgeError(lost)
    pool = native_pool.pool_containing(ptr if found is None else found.ptr)
    how = None if pool is None else pool.track
    if found is None and how == "off":
        warn_user(f"this {type(x).__name__} is in the bridge, but its allocation was not recorded; {RECORD_IT}")
    return None if found is None else as_recorded(found, how)


def stats() -> Stats:
    """Return the counters of all pools of this process.

    Also says, as a `BridgeWarning`, what came up in native code since and has not been said yet: the interpreter is
    asked to, but may take its time.

    Returns
    -------
    Stats

    Examples
    --------
    >>> x = np.ones(1 << 20)
    >>> bridge.stats().current_bytes >= x.nbytes
    True
    """
    messages.warn(ledger.take_pending_warnings(), heard=True)
    current_bytes, peak_bytes, foreign_frees, size_mismatches, failures, _, damaged_blocks = ledger.counters()
    holders = tuple((as_recorded(holder), usage) for holder, usage, _, _ in ledger.holders())
    hints_done, hints_skipped = counters.counts()
    each = [pool.numbers for pool in native_pool.pools()]
    reserved, used, quarantined, _, _, slab_free, pinned = map(sum, zip(*each, strict=True)) if each else (0,) * 7
    given_back, beyond_budget = native_process.budget_counters()
    populated_count, populated_bytes = native_process.populate_counters()
    fork_count, fork_bytes, fork_copied_bytes, fork_ns = native_process.fork_counters()
    return Stats(
        current_bytes=current_bytes,
        current_count=sum(usage.current_count for _, usage in holders),
        peak_bytes=peak_bytes,
        total_bytes=sum(usage.total_bytes for _, usage in holders),
        total_count=sum(usage.total_count for _, usage in holders),
        reserved_bytes=reserved,
        cached_bytes=max(reserved - used - quarantined, 0),
        quarantined_bytes=quarantined,
        foreign_frees=foreign_frees,
        size_mismatches=size_mismatches,
        failures=failures,
        damaged_blocks=damaged_blocks,
        track=_current.track,
        numpy_scope=_current.numpy_scope,
        hugepages=Hugepages(_current.hugepages, *native_process.hugepage_counters()),
        pools=pools(),
        frameworks=dict(_current.frameworks),
        hints_done=hints_done,
        hints_skipped=hints_skipped,
        slab_free_bytes=slab_free,
        pinned_bytes=pinned,
        given_back_count=given_back,
        beyond_budget_count=beyond_budget,
        populated_count=populated_count,
        populated_bytes=populated_bytes,
        fork_count=fork_count,
        fork_bytes=fork_bytes,
        fork_copied_bytes=fork_copied_bytes,
        fork_seconds=fork_ns / 1e9,
        holders=holders,
    )


def pools() -> Records[Generation]:
    """Return every pool that still holds memory or takes requests, oldest first."""
    native_pool.close_ended()
    return Records(
        Generation(
            number=pool.number,
            device=pool.device,
            kind=pool.kind,
            current=not pool.retired,
            current_bytes=pool.live_bytes,
            current_count=pool.live_count,
            reserved_bytes=pool.numbers[0],
        )
        for pool in native_pool.pools()
    )


def status() -> Status:
    """Return what is installed now: backend, devices, frameworks, pools.

    Returns
    -------
    Status

    Examples
    --------
    >>> bridge.status().backend
    'host'
    """
    current = _current
    return Status(
        installed=current.installed,
        backend=current.backend,
        reason=current.reason,
        devices=current.devices,
        frameworks=dict(current.frameworks),
        numpy_scope=current.numpy_scope,
        track=current.track,
        hugepages=current.hugepages,
        pools=pools(),
        hints=current.hints,
        notes=current.notes + _notes_of_this_context(),
        forked=native_process.is_child(),
        fork=current.fork,
    )


def _notes_of_this_context() -> tuple[str, ...]:
    other = foreign_handler() if _current.numpy_scope is not None else None
    if other is None:
        return ()
    return (f"NumPy's arrays of this context come from {other!r}, a handler of somebody else's, and not from the pool",)


def live_bytes_of(framework: str, device: int) -> int:
    """Return the bytes that a framework holds on a device."""
    holders = (holder for holder, *_ in ledger.holders())
    return sum(each.current_bytes for each in holders if (each.framework, each.device) == (framework, device))


def reserved_bytes_on(device: int) -> int:
    """Return the bytes that the pools of a device hold, for all frameworks."""
    return sum(pool.numbers[0] for pool in native_pool.pools() if pool.device == device)


def snapshot() -> Snapshot:
    """Return a frozen copy of the live allocations, with who held what at the high-water mark.

    Returns
    -------
    Snapshot
        It keeps no array alive, and can be pickled.

    Examples
    --------
    >>> x = np.ones(1 << 20)
    >>> bridge.snapshot().top(1)[0].requested_bytes >= x.nbytes
    True
    """
    found = ledger.snapshot()
    if _current.track == recorded.track == "sites":
        return found
    return replace(
        found,
        allocations=tuple(as_recorded(allocation) for allocation in found.allocations),
        peak=replace(found.peak, holders=tuple(as_recorded(holder) for holder in found.peak.holders)),
        track=_current.track,
    )


def history() -> History:
    """Return the newest events: failures, foreign frees and mismatched sizes, and every event after `record_events`.

    Returns
    -------
    History
        Oldest first.

    Examples
    --------
    >>> bridge.record_events(100)
    >>> x = np.ones(123_456)
    >>> [event.action for event in bridge.history() if event.requested_bytes == x.nbytes]
    ['allocate']
    >>> bridge.record_events(1000, every_event=False)
    """
    found = ledger.history()
    return replace(found, events=tuple(as_recorded(event) for event in found.events))


def record_events(limit: int = 1000, *, every_event: bool = True) -> None:
    """Keep the newest `limit` events in `history`, also plain allocations and frees if `every_event`.

    Costs about 100 ns an event. Events so far are kept as far as they fit.

    Parameters
    ----------
    limit : int
        How many events are kept, 0 to 10,000,000.
    every_event : bool
        False: only failures, foreign frees and mismatched sizes.

    Raises
    ------
    ConfigError
        If `limit` is no number of events that can be kept.

    Warns
    -----
    BridgeWarning
        With ``install(track="off")``, where plain allocations and frees are not recorded.

    Examples
    --------
    >>> bridge.record_events(100)
    >>> x = np.ones(234_567)
    >>> del x
    >>> [event.action for event in bridge.history() if event.requested_bytes == 234_567 * 8]
    ['allocate', 'deallocate']
    >>> bridge.record_events(1000, every_event=False)
    """
    try:
        limit = operator.index(limit) if not isinstance(limit, bool) else -1
    except TypeError:
        raise ConfigError(f"limit={shown(limit)} is not a number of events; write record_events(1000)") from None
    if not 0 <= limit <= _LONGEST_HISTORY:
        raise ConfigError(f"limit={limit}: a history keeps 0 to {_LONGEST_HISTORY} events")
    if _current.track == "off" and every_event and limit:
        warn_user(f"record_events() will see failures only; {RECORD_IT}")
    ledger.set_history(limit, every_event)


def reset_peak() -> None:
    """Let every peak start again from what is live now.

    Examples
    --------
    >>> bridge.reset_peak()
    >>> stats = bridge.stats()
    >>> stats.peak_bytes == stats.current_bytes
    True
    """
    ledger.reset_peak()


def trim() -> int:
    """Give what is free in all pools back to their upstreams, and return its bytes.

    Does not wait for blocks that device work still touches. Freeing managed memory waits for the whole device; the
    GIL is released meanwhile.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> x = np.ones(1 << 20)
    >>> del x
    >>> bridge.trim() > 0
    True
    """
    return sum(pool.trim() for pool in native_pool.pools())


def synchronize() -> None:
    """Wait until the work on every stream that the bridge holds is finished. The GIL is released meanwhile.

    Streams that the bridge never saw are not waited for: use the framework's own call for those.

    Raises
    ------
    BridgeError
        If one of the streams is being captured. The capture stays valid.

    Examples
    --------
    >>> bridge.synchronize()
    """
    for pool in native_pool.pools():
        pool.synchronize()
