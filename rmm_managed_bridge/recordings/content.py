"""What is in a recording, and what follows from it: who held what, when, at the peak and at the end."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from rmm_managed_bridge.recordings.layout import ALLOCATE, BLOCK, DEALLOCATE, KINDS, RESIZE, Array, Header
from rmm_managed_bridge.recordings.texts import Names
from rmm_managed_bridge.records import Allocation, CallSite, Holder, Peak, Snapshot

_SAME_WHO = ("framework", "tag", "site", "device", "kind")


@dataclass(frozen=True)
class Content:
    """A recording as it was when it was read. Sizes are bytes; nothing in it refers to the file."""

    path: Path
    header: Header
    names: Names
    events: Array
    """Of `layout.EVENT`, in the order in which they happened."""
    blocks: Array
    """Of `layout.BLOCK`: what was alive last, by serial number."""
    ledger_peak: tuple[int, Array]
    """The peak of the whole process as it was written down last, and who held it, of `layout.HOLDER`."""
    notes: tuple[str, ...]
    """What is not whole, in words."""

    @property
    def ended(self) -> bool:
        """False for a program that was killed, and for one that still runs."""
        return self.header.ended == 1

    @property
    def current_bytes(self) -> int:
        return int(self.blocks["bytes"].sum(dtype=np.int64))

    @property
    def forgotten_count(self) -> int:
        """Events that newer ones took the place of: at most this many."""
        return max(self.header.taken - self.header.event_count, 0)

    @cached_property
    def moves(self) -> Array:
        """The events that change what is live: allocations, frees and resizes."""
        return self.events[self.events["action"] <= RESIZE]

    @cached_property
    def deltas(self) -> Array:
        """By how many bytes each of the `moves` changed what is live."""
        size, before = self.moves["bytes"].astype(np.int64), self.moves["extra"].astype(np.int64)
        action = self.moves["action"]
        return np.where(action == ALLOCATE, size, np.where(action == DEALLOCATE, -size, size - before))

    @cached_property
    def live_bytes(self) -> Array:
        """What was live before the first of the `moves`, and after each."""
        known = np.concatenate([[0], np.cumsum(self.deltas)])
        return np.asarray(known + (self.current_bytes - known[-1]))

    @property
    def peak_index(self) -> int:
        """After how many of the `moves` the most was live."""
        return int(np.argmax(self.live_bytes))

    @cached_property
    def at_peak(self) -> Array:
        """What was alive then: of `layout.BLOCK`, with the sizes of then."""
        return self.alive_after(self.peak_index)

    @property
    def kept_peak_bytes(self) -> int:
        """The most that was live since the oldest event that is kept."""
        return int(self.live_bytes[self.peak_index])

    @property
    def peak_is_kept(self) -> bool:
        """Whether the peak lies among the events; otherwise only who held it is known, not which blocks."""
        return self.ledger_peak[0] <= self.kept_peak_bytes or not self.forgotten_count

    @property
    def peak(self) -> Peak:
        """The most that was live, and who held it: as events tell, or before them as the ledger told."""
        if self.peak_is_kept:
            return Peak(self.kept_peak_bytes, tuple(self.holders(self.at_peak)))
        return Peak(self.ledger_peak[0], tuple(self.holders(self.ledger_peak[1])))

    def alive_after(self, count: int) -> Array:
        """Return the blocks that were alive after the first `count` of the `moves`."""
        moves, action = self.moves, self.moves["action"]
        allocated = moves["serial"][action == ALLOCATE]
        freed_now = moves[:count]["serial"][action[:count] == DEALLOCATE]
        ends = _as_blocks(moves[action == DEALLOCATE])
        before = np.concatenate([self.blocks, ends])
        before = before[~np.isin(before["serial"], allocated)]  # these were alive when the first event came
        begun = _as_blocks(moves[:count][action[:count] == ALLOCATE])
        alive = np.concatenate([before, begun])
        alive = alive[~np.isin(alive["serial"], freed_now)]
        _, first = np.unique(alive["serial"], return_index=True)
        alive = alive[first]
        resized = moves["serial"][action == RESIZE]
        if len(resized):
            self._size_as_then(alive, count)
        return alive

    def _size_as_then(self, alive: Array, count: int) -> None:
        """Give blocks that were resized the size that they had after the first `count` moves."""
        sizes: dict[int, int] = {}
        resizes = np.flatnonzero(self.moves["action"] == RESIZE)
        for index in resizes[::-1]:
            move = self.moves[index]
            if index < count:
                sizes.setdefault(-int(move["serial"]), int(move["bytes"]))  # the last one before
            else:
                sizes[int(move["serial"])] = int(move["extra"])  # the first one after
        for block in alive:
            serial = int(block["serial"])
            if (size := sizes.get(-serial, sizes.get(serial))) is not None:
                block["bytes"] = size

    def times_ns(self, order: Array) -> Array:
        """Return when events were, in nanoseconds since the recording began."""
        header = self.header
        span = (header.clock_order - header.start_order) & 0xFFFFFFFFFFFFFFFF
        scale = max(header.clock_steady_ns - header.start_steady_ns, 0) / span if 0 < span < 1 << 63 else 0.0
        since = order.astype(np.float64) - float(header.start_order)
        return np.clip(since * scale, 0, 1 << 62).astype(np.int64)

    def allocations(self, blocks: Array) -> list[Allocation]:
        """Return blocks as records."""
        names = self.names
        return [
            Allocation(
                ptr=int(block["ptr"]),
                requested_bytes=int(block["bytes"]),
                framework=names.framework(int(block["framework"])),
                site=names.site(int(block["site"])),
                tag=names.tag(int(block["tag"])),
                device=int(block["device"]),
                stream=int(block["stream"]),
                thread=int(block["thread"]),
                time_ns=int(block["time_ns"]),
                kind=KINDS[int(block["kind"])] if block["kind"] < len(KINDS) else "unknown",
                serial=int(block["serial"]),
                resized_count=int(block["resized_count"]),
            )
            for block in blocks
        ]

    def holders(self, blocks: Array) -> list[Holder]:
        """Return who holds blocks, most first. Of `layout.HOLDER` too."""
        if not len(blocks):
            return []
        keys = np.stack([blocks[name].astype(np.int64) for name in _SAME_WHO], axis=1)
        unique, which = np.unique(keys, axis=0, return_inverse=True)
        which = which.reshape(-1)
        counts = blocks["count"] if "count" in (blocks.dtype.names or ()) else np.ones(len(blocks), np.int64)
        count, size = np.zeros(len(unique), np.int64), np.zeros(len(unique), np.int64)
        np.add.at(count, which, counts)
        np.add.at(size, which, blocks["bytes"].astype(np.int64))
        return [
            Holder(
                framework=self.names.framework(int(unique[i][0])),
                tag=self.names.tag(int(unique[i][1])),
                site=self.names.site(int(unique[i][2])),
                device=int(unique[i][3]),
                kind=KINDS[int(unique[i][4])] if unique[i][4] < len(KINDS) else "unknown",
                current_bytes=int(size[i]),
                current_count=int(count[i]),
            )
            for i in np.argsort(-size, kind="stable")
        ]

    def snapshot(self) -> Snapshot:
        """Return what was alive last, with who held what at the peak, as `rmm_managed_bridge.snapshot` does."""
        return Snapshot(tuple(self.allocations(self.blocks)), self.current_bytes, self.peak, self.header.end_time_ns)


def by_line(holders: list[Holder]) -> list[tuple[CallSite, str, int, int]]:
    """Return (site, frameworks, bytes, count) for each line, most first: one line may be several holders."""
    sums: dict[CallSite, tuple[set[str], int, int]] = {}
    for holder in holders:
        line = holder.site._replace(via=None)
        frameworks, size, count = sums.get(line, (set(), 0, 0))
        total = (frameworks | {holder.framework}, size + holder.current_bytes, count + holder.current_count)
        sums[line] = total
    rows = [(site, ", ".join(sorted(who)), size, count) for site, (who, size, count) in sums.items()]
    return sorted(rows, key=lambda row: -row[2])


def _as_blocks(events: Array) -> Array:
    blocks = np.zeros(len(events), BLOCK)
    for name in ("serial", "ptr", "bytes", "site", "tag", "thread", "device", "framework", "kind"):
        blocks[name] = events[name]
    blocks["stream"] = np.where(events["action"] == ALLOCATE, events["extra"], 0)
    return blocks
