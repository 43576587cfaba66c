"""Frozen records: what the ledger says about memory. No record refers to the memory it describes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rmm_managed_bridge.errors import ConfigError, shown, warn_renamed
from rmm_managed_bridge.units import format_bytes

GroupKey = Literal["framework", "tag", "site", "device", "kind"]
GROUP_KEYS: tuple[GroupKey, ...] = ("framework", "tag", "site", "device", "kind")


def _renamed(old: str, new: str) -> property:
    """Return the old name of an attribute, for one release. Without an annotation it is no field."""

    def read(record: Any) -> Any:
        warn_renamed(old, new)
        return getattr(record, new)

    return property(read)


class CallSite(NamedTuple):
    """The first frame outside the bridge and the frameworks; file ``"native"`` where there was none to read."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return self.file if self.line == 0 else f"{self.file}:{self.line}"


class Allocation(NamedTuple):
    """One live block, as it was when the record was read."""

    ptr: int
    requested_bytes: int
    framework: str
    site: CallSite
    tag: str
    device: int
    """CUDA device number; -1 for host memory."""
    stream: int
    """Handle of the stream that the block was allocated on; 0 for host order and for the default stream."""
    thread: int
    """Native thread id, as :func:`threading.get_native_id` gives it."""
    time_ns: int
    """Nanoseconds since the epoch, from a coarse clock (about 4 ms)."""
    kind: str
    """``"managed"``, ``"system"``, ``"host"``, or ``"device"`` for an upstream that the bridge cannot place."""
    serial: int
    """Tells allocations of this process apart. Rises with time within a thread; threads take numbers in blocks."""
    resized_count: int

    def __str__(self) -> str:
        return f"{format_bytes(self.requested_bytes)}, {_whose(self)}, {self.kind}"


class Holder(NamedTuple):
    """What one (framework, tag, site, device, kind) held."""

    framework: str
    tag: str
    site: CallSite
    device: int
    kind: str
    current_bytes: int
    current_count: int

    def __str__(self) -> str:
        return f"{format_bytes(self.current_bytes)} in {self.current_count}, {_whose(self)}, {self.kind}"


class Usage(NamedTuple):
    """Counters of one holder, or of the sum over several."""

    current_bytes: int
    current_count: int
    peak_bytes: int
    """Highest `current_bytes` of this holder over all threads; for a sum of holders, an upper bound of the true peak.

    Exact for one thread, and for blocks of 1 MiB and more; with several threads off by up to 256 KiB."""
    total_bytes: int
    total_count: int


class Generation(NamedTuple):
    """One pool that was attached to one device, current or retired."""

    number: int
    device: int
    kind: str
    current: bool
    current_bytes: int
    current_count: int
    reserved_bytes: int


class Hugepages(NamedTuple):
    """What was advised about huge pages."""

    mode: str
    """What `install` was told, by its `hugepages` or its `hints`; ``"never"`` while nothing is installed."""
    advised_bytes: int
    """How much memory of the pools carries the advice now, live blocks and free ones together."""
    call_count: int
    """Calls of ``madvise`` so far, also those that ended advice."""
    failure_count: int
    """Those of them that failed. Nothing follows from a failure but that the advice is not there."""


_NOTHING_ADVISED = Hugepages("never", 0, 0, 0)


def require_key(key: object) -> None:
    """Refuse what records are not grouped by, also where there is none to group."""
    if not isinstance(key, str) or key not in GROUP_KEYS:
        raise ConfigError(f"cannot group by {shown(key)}; use one of {', '.join(GROUP_KEYS)}")


def group_value(record: Allocation | Holder, key: GroupKey) -> str:
    """Return what `record` is grouped under for `key`, as text."""
    require_key(key)
    if key == "device":
        return device_name(record.device)
    return str(getattr(record, key))


@dataclass(frozen=True)
class Peak:
    """Who held what when the live bytes were at their highest."""

    current_bytes: int
    holders: tuple[Holder, ...]

    def by(self, key: GroupKey) -> dict[str, int]:
        """Return bytes per framework, tag, site, device or kind, largest first."""
        return _sum_by(((holder, holder.current_bytes) for holder in self.holders), key)

    def top(self, count: int) -> tuple[Holder, ...]:
        """Return the `count` holders with the most bytes; none for a count below 1."""
        return tuple(sorted(self.holders, key=lambda holder: -holder.current_bytes)[: max(count, 0)])


@dataclass(frozen=True)
class Snapshot:
    """A frozen copy of the live allocations. It keeps no memory alive and does not change."""

    allocations: tuple[Allocation, ...]
    current_bytes: int
    peak: Peak
    time_ns: int = 0
    track: str = "sites"
    """What `install` was told to record. With ``"off"`` there is nothing here, whatever is alive."""

    def by(self, key: GroupKey) -> dict[str, int]:
        """Return live bytes per framework, tag, site, device or kind, largest first."""
        return _sum_by(((a, a.requested_bytes) for a in self.allocations), key)

    def top(self, count: int) -> tuple[Allocation, ...]:
        """Return the `count` largest live allocations; none for a count below 1."""
        return tuple(sorted(self.allocations, key=lambda allocation: -allocation.requested_bytes)[: max(count, 0)])

    def compare(self, other: "Snapshot") -> "SnapshotDifference":
        """Return what came, went and changed its size between `other` (earlier) and this snapshot."""
        if not isinstance(other, Snapshot):
            raise ConfigError(f"compare() takes an earlier snapshot(), not {shown(other)}; keep one before")
        before = {allocation.serial: allocation for allocation in other.allocations}
        now = {allocation.serial for allocation in self.allocations}
        return SnapshotDifference(
            added=tuple(a for a in self.allocations if a.serial not in before),
            freed=tuple(a for a in other.allocations if a.serial not in now),
            resized=tuple(
                (before[a.serial], a)
                for a in self.allocations
                if a.serial in before and before[a.serial].requested_bytes != a.requested_bytes
            ),
        )

    def __len__(self) -> int:
        return len(self.allocations)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self.allocations)

    def __repr__(self) -> str:
        if self.track == "off" and not self.allocations:
            return "<Snapshot: not recorded (track='off')>"
        return (
            f"<Snapshot: {format_bytes(self.current_bytes)} in {len(self.allocations)} allocations, "
            f"peak {format_bytes(self.peak.current_bytes)}>"
        )

    def __str__(self) -> str:
        lines = [repr(self)]
        for key in ("framework", "tag", "device"):
            parts = ", ".join(f"{name or '(none)'} {format_bytes(size)}" for name, size in self.by(key).items())
            if parts:
                lines.append(f"  by {key}: {parts}")
        lines.extend(f"  {allocation}" for allocation in self.top(10))
        if len(self.allocations) > 10:
            lines.append(f"  ... and {len(self.allocations) - 10} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class SnapshotDifference:
    """What changed between two snapshots. Allocations are told apart by serial number; a resized one keeps its own."""

    added: tuple[Allocation, ...]
    freed: tuple[Allocation, ...]
    resized: tuple[tuple[Allocation, Allocation], ...] = ()
    """(before, after) of each."""
    appeared = _renamed("appeared", "added")
    vanished = _renamed("vanished", "freed")

    @property
    def current_bytes(self) -> int:
        """Growth of the live bytes; negative if more went away than came."""
        grown = sum(after.requested_bytes - before.requested_bytes for before, after in self.resized)
        return sum(a.requested_bytes for a in self.added) - sum(a.requested_bytes for a in self.freed) + grown

    def __str__(self) -> str:
        counts = f"{len(self.added)} added, {len(self.freed)} freed, {len(self.resized)} resized"
        lines = [f"<{format_bytes(self.current_bytes)} more: {counts}>"]
        shown = [f"  + {allocation}" for allocation in self.added]
        shown.extend(f"  - {allocation}" for allocation in self.freed)
        shown.extend(f"  ~ {after}, was {format_bytes(before.requested_bytes)}" for before, after in self.resized)
        lines.extend(shown[:20])
        if len(shown) > 20:
            lines.append(f"  ... and {len(shown) - 20} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class Stats:
    """Counters over all pools of this process, read at one moment; exact if no other thread allocates meanwhile."""

    current_bytes: int
    current_count: int
    peak_bytes: int
    total_bytes: int
    total_count: int
    reserved_bytes: int
    """What the pools hold from their upstreams."""
    cached_bytes: int
    """The part of `reserved_bytes` that no live block uses and that can be handed out."""
    quarantined_bytes: int
    """The part of `reserved_bytes` that was freed while device work on it was not known to be finished."""
    foreign_frees: int
    size_mismatches: int
    failures: int
    track: str
    numpy_scope: str | None
    hugepages: Hugepages = _NOTHING_ADVISED
    pools: tuple[Generation, ...] = ()
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """How each framework stands: ``"hooked"``, or the reason why not."""
    damaged_blocks: int = 0
    """With ``pool="debug"``: how often a block was found written out of its bounds or after it was freed."""
    hints_done: Mapping[str, int] = field(default_factory=dict)
    """Hints that the driver took, by action."""
    hints_skipped: Mapping[str, int] = field(default_factory=dict)
    """Hints that were not given, by reason."""
    slab_free_bytes: int = 0
    """The part of `cached_bytes` that lies between small blocks: it goes back once all blocks of its slab are free."""
    pinned_bytes: int = 0
    """The part of `cached_bytes` in pieces of a device's memory that go back as a whole, and in which blocks live."""
    given_back_count: int = 0
    """How often a piece, or a part of one, went back to where it came from."""
    beyond_budget_count: int = 0
    """How often a pool grew beyond its budget, since it had nothing that could go back."""
    holders: tuple[tuple[Holder, Usage], ...] = field(default=(), repr=False)
    generations = _renamed("generations", "pools")

    def by(self, key: GroupKey) -> dict[str, Usage]:
        """Return counters per framework, tag, site, device or kind, most live bytes first."""
        require_key(key)
        groups: dict[str, list[Usage]] = {}
        for holder, usage in self.holders:
            groups.setdefault(group_value(holder, key), []).append(usage)
        summed = {name: Usage(*map(sum, zip(*usages, strict=True))) for name, usages in groups.items()}
        return dict(sorted(summed.items(), key=lambda item: (-item[1].current_bytes, item[0])))

    def __str__(self) -> str:
        if self.track == "off":
            return (
                "live, peak and total not recorded (track='off'), "
                f"reserved {format_bytes(self.reserved_bytes)} (cached {format_bytes(self.cached_bytes)}, "
                f"quarantined {format_bytes(self.quarantined_bytes)})"
            )
        return (
            f"live {format_bytes(self.current_bytes)} in {self.current_count}, peak {format_bytes(self.peak_bytes)}, "
            f"total {format_bytes(self.total_bytes)} in {self.total_count}, "
            f"reserved {format_bytes(self.reserved_bytes)} (cached {format_bytes(self.cached_bytes)}, "
            f"quarantined {format_bytes(self.quarantined_bytes)})"
        )


@dataclass(frozen=True)
class Status:
    """What is installed now. Printable."""

    installed: bool
    backend: str | None
    reason: str
    """Why this backend."""
    devices: tuple[int, ...]
    frameworks: Mapping[str, str]
    """``"hooked"``, or the reason why not, for each framework that was looked at."""
    numpy_scope: str | None
    track: str
    hugepages: str = "never"
    pools: tuple[Generation, ...] = ()
    hints: str = "none"
    """Which hints are given where neither the context nor a tag says otherwise."""
    notes: tuple[str, ...] = ()
    """What was asked for and has no effect here."""
    generations = _renamed("generations", "pools")

    def __str__(self) -> str:
        if not self.installed:
            return "rmm_managed_bridge is not installed in this process; call rmm_managed_bridge.install()"
        lines = [f"backend {self.backend}: {self.reason}"]
        lines.extend(f"  {name}: {state}" for name, state in self.frameworks.items())
        scope = self.numpy_scope or "not hooked"
        lines.append(f"  call sites: {self.track}; NumPy scope: {scope}; hints: {self.hints}")
        lines.extend(f"  note: {note}" for note in self.notes)
        for each in self.pools:
            where, state = device_name(each.device), "current" if each.current else "retired"
            live = f"{format_bytes(each.current_bytes)} live in {each.current_count}"
            lines.append(
                f"  pool {each.number} on {where}, {state}: {live}, {format_bytes(each.reserved_bytes)} reserved"
            )
        return "\n".join(lines)


class Event(NamedTuple):
    """One thing that happened to memory, from the bounded history."""

    action: str
    """``"allocate"``, ``"deallocate"``, ``"resize"``, ``"failure"``, ``"foreign_free"``, ``"size_mismatch"`` or
    ``"damage"``."""
    ptr: int
    requested_bytes: int
    stated_bytes: int
    """What the caller of a free said the size was; 0 where it said nothing."""
    framework: str
    tag: str
    site: CallSite
    device: int
    stream: int
    thread: int
    time_ns: int
    serial: int

    def __str__(self) -> str:
        stated = f" (freed as {self.stated_bytes} bytes)" if self.stated_bytes not in (0, self.requested_bytes) else ""
        where = f" at {self.ptr:#x}" if self.ptr else ""
        return f"{self.action} of {format_bytes(self.requested_bytes)}{stated}{where}, {_whose(self)}"


@dataclass(frozen=True)
class History:
    """The newest events, oldest first, and how many older ones were dropped. Printable."""

    events: tuple[Event, ...]
    dropped_count: int

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        counts = Counter(event.action for event in self.events)
        actions = ", ".join(f"{count} {action}" for action, count in counts.most_common()) or "no events"
        return f"<History: {actions}; {self.dropped_count} older ones dropped>"

    def __str__(self) -> str:
        lines = [repr(self)]
        if len(self.events) > 10:
            lines.append(f"  ... {len(self.events) - 10} before these")
        lines.extend(f"  {event}" for event in self.events[-10:])
        return "\n".join(lines)


def device_name(device: int) -> str:
    """Return ``"cuda:0"`` and the like, or ``"host"`` for -1."""
    return "host" if device < 0 else f"cuda:{device}"


def _whose(record: Allocation | Holder | Event) -> str:
    tag = f', tag "{record.tag}"' if record.tag else ""
    return f"{record.framework}{tag}, {record.site}, {device_name(record.device)}"


def _sum_by(sized: Iterable[tuple[Allocation | Holder, int]], key: GroupKey) -> dict[str, int]:
    require_key(key)
    sums: dict[str, int] = {}
    for record, size_bytes in sized:
        name = group_value(record, key)
        sums[name] = sums.get(name, 0) + size_bytes
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
