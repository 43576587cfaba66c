"""Records of many things: what is alive, what held the memory at its peak, what changed, what happened."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

from rmm_managed_bridge.errors import ConfigError, shown, warn_renamed
from rmm_managed_bridge.records.listing import Groups, Records, largest
from rmm_managed_bridge.records.single import Allocation, Event, GroupKey, Holder, group_value, require_key
from rmm_managed_bridge.units import format_bytes, format_count

_SHOWN = 10
_CHANGES_SHOWN = 20


def renamed(old: str, new: str) -> property:
    """Return the old name of an attribute, for one release. Without an annotation it is no field."""

    def read(record: Any) -> Any:
        warn_renamed(old, new)
        return getattr(record, new)

    return property(read)


class ByteSums(Groups[int]):
    """Bytes by name; prints as a table of sizes."""

    def cells(self, value: int) -> dict[str, str]:
        """Return the size."""
        return {"size": format_bytes(value)}


@dataclass(frozen=True)
class Peak:
    """Who held what when the live bytes were at their highest. Printable."""

    current_bytes: int
    holders: tuple[Holder, ...]
    """One for each (framework, tag, site, device, kind)."""

    def __post_init__(self) -> None:
        _set(self, "holders", _by_holder((each, each.current_bytes, each.current_count) for each in self.holders))

    def by(self, key: GroupKey) -> ByteSums:
        """Return bytes per framework, tag, site, device or kind, largest first."""
        return _sum_by(((holder, holder.current_bytes) for holder in self.holders), key)

    def top(self, count: int = _SHOWN) -> Records[Holder]:
        """Return the `count` holders with the most bytes; none for a count below 1."""
        return Records(largest(self.holders, _held, count))

    def __repr__(self) -> str:
        blocks = sum(holder.current_count for holder in self.holders)
        return f"<Peak: {format_bytes(self.current_bytes)} in {format_count(blocks, 'allocation')}>"

    def __str__(self) -> str:
        return "\n".join([repr(self), *_top_lines(self.holders, _SHOWN, "print(peak.holders)")])


@dataclass(frozen=True)
class Snapshot:
    """A frozen copy of the live allocations. It keeps no memory alive and does not change.

    ``print(snapshot)`` sums by line; ``print(snapshot.allocations)`` shows every block.

    Examples
    --------
    >>> before = bridge.snapshot()
    >>> with bridge.tag("load"):
    ...     x = np.ones(1 << 20)
    >>> change = bridge.snapshot().compare(before)
    >>> [(each.tag, each.requested_bytes) for each in change.added]
    [('load', 8388608)]
    """

    allocations: tuple[Allocation, ...]
    current_bytes: int
    peak: Peak
    time_ns: int = 0
    track: str = "sites"
    """What `install` was told to record. With ``"off"`` there is nothing here, whatever is alive."""

    def __post_init__(self) -> None:
        _set(self, "allocations", Records(self.allocations))

    @property
    def holders(self) -> Records[Holder]:
        """The same summed by framework, tag, line, device and kind, most bytes first."""
        return _by_holder((each, each.requested_bytes, 1) for each in self.allocations)

    def by(self, key: GroupKey) -> ByteSums:
        """Return live bytes per framework, tag, site, device or kind, largest first."""
        return _sum_by(((a, a.requested_bytes) for a in self.allocations), key)

    def top(self, count: int = _SHOWN) -> Records[Allocation]:
        """Return the `count` largest live allocations; none for a count below 1."""
        return Records(largest(self.allocations, lambda allocation: allocation.requested_bytes, count))

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

    @overload
    def __getitem__(self, index: SupportsIndex) -> Allocation: ...
    @overload
    def __getitem__(self, index: slice) -> Records[Allocation]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Allocation | Records[Allocation]:
        return Records(self.allocations)[index]

    def __repr__(self) -> str:
        if self.track == "off" and not self.allocations:
            return "<Snapshot: not recorded (track='off')>"
        return (
            f"<Snapshot: {format_bytes(self.current_bytes)} in {format_count(len(self.allocations), 'allocation')}, "
            f"peak {format_bytes(self.peak.current_bytes)}>"
        )

    def __str__(self) -> str:
        lines = [repr(self)]
        for key in ("framework", "tag", "device"):
            parts = ", ".join(f"{name or '(none)'} {format_bytes(size)}" for name, size in self.by(key).items())
            if parts:
                lines.append(f"  by {key}: {parts}")
        return "\n".join([*lines, *_top_lines(self.holders, _SHOWN, "print(snapshot.holders)")])


@dataclass(frozen=True)
class SnapshotDifference:
    """What changed between two snapshots. Allocations are told apart by serial number; a resized one keeps its own.

    ``print`` sums by line; `added`, `freed` and `resized` have every block.
    """

    added: tuple[Allocation, ...]
    freed: tuple[Allocation, ...]
    resized: tuple[tuple[Allocation, Allocation], ...] = ()
    """(before, after) of each."""
    appeared = renamed("appeared", "added")
    vanished = renamed("vanished", "freed")

    def __post_init__(self) -> None:
        _set(self, "added", Records(self.added))
        _set(self, "freed", Records(self.freed))

    @property
    def current_bytes(self) -> int:
        """Growth of the live bytes; negative if more went away than came."""
        return sum(size_bytes for _, size_bytes, _ in self._changes())

    @property
    def holders(self) -> Records[Holder]:
        """The growth of each (framework, tag, line, device, kind), in bytes and blocks, most bytes first."""
        return _by_holder(self._changes())

    def by(self, key: GroupKey) -> ByteSums:
        """Return the growth per framework, tag, site, device or kind, most bytes first."""
        return _sum_by(((allocation, size_bytes) for allocation, size_bytes, _ in self._changes()), key)

    def top(self, count: int = _SHOWN) -> Records[Holder]:
        """Return the `count` holders that grew the most; none for a count below 1."""
        return Records(largest(self.holders, _held, count))

    def _changes(self) -> Iterator[tuple[Allocation, int, int]]:
        yield from ((allocation, allocation.requested_bytes, 1) for allocation in self.added)
        yield from ((allocation, -allocation.requested_bytes, -1) for allocation in self.freed)
        for before, after in self.resized:
            yield after, after.requested_bytes - before.requested_bytes, 0

    def __repr__(self) -> str:
        counts = f"{len(self.added)} added, {len(self.freed)} freed, {len(self.resized)} resized"
        change = "less" if self.current_bytes < 0 else "more"
        return f"<{format_bytes(abs(self.current_bytes))} {change}: {counts}>"

    def __str__(self) -> str:
        changed = [holder for holder in self.holders if holder.current_bytes or holder.current_count]
        return "\n".join([repr(self), *_top_lines(changed, _CHANGES_SHOWN, "print(difference.holders)")])


@dataclass(frozen=True)
class History:
    """The newest events, oldest first, and how many older ones were dropped. Printable; ``history[-3:]`` is a part."""

    events: tuple[Event, ...]
    dropped_count: int

    def __post_init__(self) -> None:
        _set(self, "events", Records(self.events))

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Records[Event]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Event | Records[Event]:
        return Records(self.events)[index]

    def __repr__(self) -> str:
        counts = Counter(event.action for event in self.events)
        actions = ", ".join(f"{count} {action}" for action, count in counts.most_common()) or "no events"
        return f"<History: {actions}; {self.dropped_count} older ones dropped>"

    def __str__(self) -> str:
        lines = [repr(self)]
        if len(self.events) > _SHOWN:
            lines.append(f"  ... {len(self.events) - _SHOWN} before these; print(history.events) shows all")
        lines.extend(f"  {event}" for event in self.events[-_SHOWN:])
        return "\n".join(lines)


def _set(record: object, name: str, value: object) -> None:
    """Set a field of a frozen record, in its `__post_init__`."""
    object.__setattr__(record, name, value)


def _held(holder: Holder) -> int:
    return holder.current_bytes


def _by_holder(sized: Iterable[tuple[Allocation | Holder, int, int]]) -> Records[Holder]:
    """Sum (record, bytes, blocks) by all that tells holders apart for a reader: of the site, file and line."""
    sums: dict[tuple[Any, ...], list[Any]] = {}
    for record, size_bytes, count in sized:
        site = record.site
        found = sums.setdefault(
            (record.framework, record.tag, site.place, record.device, record.kind), [record, site, 0, 0]
        )
        if found[1].via != site.via:
            found[1] = found[1]._replace(via=None)
        found[2] += size_bytes
        found[3] += count
    held = [
        Holder(record.framework, record.tag, site, record.device, record.kind, size_bytes, count)
        for record, site, size_bytes, count in sums.values()
    ]
    return Records(largest(held, _held, len(held)))


def _top_lines(holders: Iterable[Holder], count: int, all_of_them: str) -> list[str]:
    held = Records(holders)
    rest = held[count:]
    lines = [f"  {line}" for line in str(held[:count]).splitlines()] if held else []
    if rest:
        size_bytes, blocks = sum(map(_held, rest)), sum(holder.current_count for holder in rest)
        size = f"{format_bytes(size_bytes)} in {blocks}"
        lines.append(f"  ... and {format_count(len(rest), 'more line')}, {size}; {all_of_them} shows all")
    return lines


def _sum_by(sized: Iterable[tuple[Allocation | Holder, int]], key: GroupKey) -> ByteSums:
    require_key(key)
    sums: dict[str, int] = {}
    for record, size_bytes in sized:
        name = group_value(record, key)
        sums[name] = sums.get(name, 0) + size_bytes
    return ByteSums(key, dict(sorted(sums.items(), key=lambda item: (-item[1], item[0]))))
