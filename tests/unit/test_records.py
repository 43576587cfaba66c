"""Frozen records: grouping, order, comparison and text."""

import dataclasses
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmm_managed_bridge.errors import ConfigError
from rmm_managed_bridge.records import (
    GROUP_KEYS,
    Allocation,
    CallSite,
    Event,
    GroupKey,
    History,
    Holder,
    Peak,
    Records,
    Snapshot,
    SnapshotDifference,
    Stats,
    Usage,
    group_value,
)
from rmm_managed_bridge.units import format_bytes

SITES = (CallSite("sim.py", 9, "main"), CallSite("sim.py", 90, "main"), CallSite("native", 0, ""))
EMPTY_PEAK = Peak(0, ())
names = st.sampled_from(["numpy", "cupy", "warp", "rmm"])
tags = st.sampled_from(["", "load", "step"])
sites = st.sampled_from(SITES)
devices = st.integers(-1, 2)
kinds = st.sampled_from(["managed", "host"])
byte_counts = st.integers(0, 1 << 50)
keys = st.sampled_from(GROUP_KEYS)
holders = st.builds(Holder, names, tags, sites, devices, kinds, byte_counts, st.integers(1, 9))
usages = st.builds(Usage, byte_counts, st.integers(0, 99), byte_counts, byte_counts, st.integers(0, 99))


def make_allocation(serial: int = 1, requested_bytes: int = 1 << 24, **changes: object) -> Allocation:
    """Return a record of a NumPy block, with `changes`."""
    allocation = Allocation(serial << 40, requested_bytes, "numpy", SITES[0], "load", 0, 0, 1, 0, "managed", serial, 0)
    return allocation._replace(**changes)  # type: ignore[arg-type]


def make_snapshot(allocations: Sequence[Allocation]) -> Snapshot:
    """Return a snapshot of `allocations`, as the ledger would give it."""
    return Snapshot(tuple(allocations), sum(a.requested_bytes for a in allocations), EMPTY_PEAK)


def make_stats(counted: Sequence[tuple[Holder, Usage]]) -> Stats:
    """Return counters with the `counted` holders and zero everywhere else."""
    return Stats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, track="sites", numpy_scope=None, holders=tuple(counted))


@st.composite
def allocation_lists(draw: st.DrawFn) -> list[Allocation]:
    """Draw live blocks: one record for a serial, the same in each list that has it."""
    serials = draw(st.lists(st.integers(1, 40), unique=True, max_size=12))
    seeds = [(serial * 7919) & 0xFFFF for serial in serials]
    return [
        make_allocation(
            serial, seed * 1000, framework=("numpy", "cupy", "warp")[seed % 3], tag=("", "load")[seed % 2],
            site=SITES[seed % 3], device=seed % 4 - 1, kind=("managed", "host")[seed % 2],
        )
        for serial, seed in zip(serials, seeds, strict=True)
    ]  # fmt: skip


snapshots = allocation_lists().map(make_snapshot)


def is_falling(values: Sequence[int]) -> bool:
    """Tell whether no value is above the one before."""
    return all(left >= right for left, right in itertools.pairwise(values))


@given(snapshots, keys)
def test_snapshot_by_shares_out_the_current_bytes(snapshot: Snapshot, key: GroupKey) -> None:
    """Every byte is in one group, and the largest group is first."""
    groups = snapshot.by(key)
    assert sum(groups.values()) == snapshot.current_bytes
    assert set(groups) == {group_value(allocation, key) for allocation in snapshot}
    assert is_falling(list(groups.values()))


@given(st.lists(holders, max_size=12), keys)
def test_peak_by_shares_out_the_peak(held: list[Holder], key: GroupKey) -> None:
    """The same for who held what at the high-water mark."""
    peak = Peak(sum(holder.current_bytes for holder in held), tuple(held))
    groups = peak.by(key)
    assert sum(groups.values()) == peak.current_bytes
    assert is_falling(list(groups.values()))


@given(st.lists(st.tuples(holders, usages), max_size=8), keys)
def test_stats_by_adds_up_every_counter(counted: list[tuple[Holder, Usage]], key: GroupKey) -> None:
    """Sums over the groups equal sums over the holders, in each field."""
    groups = make_stats(counted).by(key)
    for name in Usage._fields:
        assert sum(getattr(u, name) for u in groups.values()) == sum(getattr(u, name) for _, u in counted)
    assert is_falling([usage.current_bytes for usage in groups.values()])


def test_grouping_names() -> None:
    """Devices are named as frameworks name them, a site by its line, and another key is refused."""
    allocation = make_allocation()
    assert [group_value(allocation, key) for key in GROUP_KEYS] == ["numpy", "load", "sim.py:9", "cuda:0", "managed"]
    assert group_value(make_allocation(device=-1), "device") == "host"
    assert group_value(make_allocation(site=SITES[2]), "site") == "native"
    for refuse in (
        make_snapshot([allocation]).by,
        make_stats([(Holder("", "", SITES[0], 0, "", 1, 1), Usage(*[1] * 5))]).by,
    ):
        with pytest.raises(ValueError, match="cannot group by 'thread'; use one of framework, tag, site, device, kind"):
            refuse("thread")  # type: ignore[arg-type]


@given(snapshots, st.integers(0, 15))
def test_snapshot_top_is_the_largest(snapshot: Snapshot, count: int) -> None:
    """As many as asked for, falling, and none left out is larger."""
    top = snapshot.top(count)
    assert len(top) == min(count, len(snapshot))
    assert [a.requested_bytes for a in top] == sorted((a.requested_bytes for a in snapshot), reverse=True)[:count]
    assert set(top) <= set(snapshot)


@given(st.lists(holders, max_size=12), st.integers(0, 15))
def test_peak_top_is_the_largest(held: list[Holder], count: int) -> None:
    """The same for holders, of which each line is there once, with all of its bytes and blocks."""
    peak = Peak(0, tuple(held))
    sizes = [h.current_bytes for h in peak.top(len(held))]
    assert sizes == sorted(sizes, reverse=True)
    assert [h.current_bytes for h in peak.top(count)] == sizes[:count]
    assert len({holder[:5] for holder in peak.holders}) == len(peak.holders)
    assert sum(sizes) == sum(h.current_bytes for h in held)
    assert sum(h.current_count for h in peak.holders) == sum(h.current_count for h in held)


@given(snapshots)
def test_holders_of_a_snapshot_are_its_allocations_by_line(snapshot: Snapshot) -> None:
    """No byte and no block is lost, and the sums are those of `by`."""
    assert sum(h.current_bytes for h in snapshot.holders) == snapshot.current_bytes
    assert sum(h.current_count for h in snapshot.holders) == len(snapshot)
    assert Peak(0, tuple(snapshot.holders)).by("site") == snapshot.by("site")


@given(snapshots, snapshots, keys)
def test_sums_of_a_difference_are_differences_of_sums(before: Snapshot, after: Snapshot, key: GroupKey) -> None:
    growth, old, new = after.compare(before).by(key), before.by(key), after.by(key)
    for name in old.keys() | new.keys():
        assert growth.get(name, 0) == new.get(name, 0) - old.get(name, 0)
    assert sum(h.current_bytes for h in after.compare(before).holders) == after.compare(before).current_bytes
    assert sum(h.current_count for h in after.compare(before).holders) == len(after) - len(before)


@pytest.mark.parametrize("count", ["a", 1.5, None, [1]])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    for record in (EMPTY_PEAK, make_snapshot([]), make_snapshot([]).compare(make_snapshot([]))):
        with pytest.raises(ConfigError, match="is not a number of records"):
            record.top(count)


@given(snapshots, snapshots)
def test_compare_is_antisymmetric(before: Snapshot, after: Snapshot) -> None:
    """What was added one way was freed the other way, and the growth changes its sign."""
    forth, back = after.compare(before), before.compare(after)
    assert (forth.added, forth.freed) == (back.freed, back.added)
    assert forth.current_bytes == -back.current_bytes == after.current_bytes - before.current_bytes


@given(snapshots, snapshots)
def test_compare_leads_from_one_to_the_other(before: Snapshot, after: Snapshot) -> None:
    """Earlier, less what was freed, plus what was added, is later; a snapshot does not differ from itself."""
    difference = after.compare(before)
    assert (set(before) - set(difference.freed)) | set(difference.added) == set(after)
    assert after.compare(after) == SnapshotDifference((), ())


@given(byte_counts, byte_counts)
def test_compare_counts_the_growth_of_a_resized_block(old_bytes: int, new_bytes: int) -> None:
    """A resized block keeps its serial in the ledger; its growth is growth all the same."""
    before = make_snapshot([make_allocation(1, old_bytes)])
    after = make_snapshot([make_allocation(1, new_bytes, resized_count=1)])
    assert after.compare(before).current_bytes == new_bytes - old_bytes


@pytest.mark.behaviour("U3")
@given(snapshots)
def test_snapshot_text_accounts_for_every_allocation(snapshot: Snapshot) -> None:
    """The largest ten lines of the program are there, and the rest is counted, not dropped in silence."""
    text = str(snapshot)
    assert text.splitlines()[0] == repr(snapshot)
    assert format_bytes(snapshot.current_bytes) in repr(snapshot)
    for holder in snapshot.holders[:10]:
        assert format_bytes(holder.current_bytes) in text
    more = len(snapshot.holders) - 10
    assert (f"and {more} more line" in text) == (more > 0)


@pytest.mark.behaviour("U3")
def test_difference_text_sums_by_line() -> None:
    """A leak of twenty blocks of one line is one row; what was resized counts with its growth."""
    many = [make_allocation(serial) for serial in range(1, 21)]
    gone = make_allocation(30, 1 << 20, site=SITES[1])
    resized = make_allocation(31, 1 << 20, site=SITES[2]), make_allocation(31, 3 << 20, site=SITES[2], resized_count=1)
    difference = make_snapshot([*many, resized[1]]).compare(make_snapshot([gone, resized[0]]))
    lines = str(difference).splitlines()
    assert lines[0] == "<321 MiB more: 20 added, 1 freed, 1 resized>"
    back = make_snapshot([gone, resized[0]]).compare(make_snapshot([*many, resized[1]]))
    assert repr(back) == "<321 MiB less: 1 added, 20 freed, 1 resized>"
    assert [line.split()[:3] for line in lines[2:]] == [
        ["320", "MiB", "20"],
        ["2.00", "MiB", "0"],
        ["-1.00", "MiB", "-1"],
    ]
    assert [holder.current_count for holder in difference.top(2)] == [20, 0]


def test_difference_text_accounts_for_every_line() -> None:
    many = [make_allocation(serial, site=CallSite("sim.py", serial, "main")) for serial in range(1, 23)]
    lines = str(make_snapshot(many).compare(make_snapshot([]))).splitlines()
    assert "22 added, 0 freed, 0 resized" in lines[0]
    assert len(lines) == 1 + 1 + 20 + 1
    assert lines[-1] == "  ... and 2 more lines, 32.0 MiB in 2; print(difference.holders) shows all"


def test_text_of_single_records() -> None:
    """What the README's example prints, and the same without tag, on the host, from native code."""
    assert str(make_allocation()) == '16.0 MiB, numpy, tag "load", sim.py:9, cuda:0, managed'
    plain = make_allocation(requested_bytes=5, tag="", device=-1, kind="host", site=SITES[2])
    assert str(plain) == "5 B, numpy, native, host, host"
    holder = Holder("warp", "step", SITES[1], 1, "managed", 3 << 20, 3)
    assert str(holder) == '3.00 MiB in 3, warp, tag "step", sim.py:90, cuda:1, managed'
    assert str(make_stats([])).startswith("live 0 B in 0, peak 0 B, ")


def test_records_cannot_be_changed() -> None:
    """Neither fields nor the contents they hold."""
    snapshot = make_snapshot([make_allocation()])
    for record, name in ((snapshot, "current_bytes"), (EMPTY_PEAK, "holders"), (make_stats([]), "failures")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, 1)
    with pytest.raises(AttributeError):
        snapshot.allocations[0].ptr = 1  # type: ignore[misc]


def test_one_is_singular() -> None:
    assert "in 1 allocation," in repr(make_snapshot([make_allocation()]))
    assert "in 2 allocations," in repr(make_snapshot([make_allocation(), make_allocation(2)]))


def test_parts_of_what_has_a_length() -> None:
    snapshot = make_snapshot([make_allocation(serial) for serial in range(1, 6)])
    assert snapshot[0] == snapshot.allocations[0]
    assert snapshot[-2:] == snapshot.allocations[-2:]
    assert isinstance(snapshot[1:], Records)


def test_counters_and_states_are_a_line_where_python_echoes_them() -> None:
    assert repr(make_stats([])).startswith("<Stats: live 0 B in 0, peak 0 B")
    for record in (make_stats([]), make_snapshot([make_allocation()]), EMPTY_PEAK, History((), 0)):
        assert "\n" not in repr(record)
        assert pickle.loads(pickle.dumps(record)) == record


def test_history_is_its_events() -> None:
    """Length and order are those of the events; the dropped ones are a number beside."""
    event = Event("allocate", 1, 1, 0, "numpy", "", SITES[0], 0, 0, 1, 0, 1)
    history = History((event, event._replace(serial=2)), 7)
    assert (len(history), [e.serial for e in history], history.dropped_count) == (2, [1, 2], 7)


def test_a_history_says_what_happened_and_shows_the_newest() -> None:
    assert repr(History((), 0)) == "<History: no events; 0 older ones dropped>"
    freed = Event("size_mismatch", 0x1000, 2048, 100, "rmm", "load", SITES[0], 1, 0, 1, 0, 1)
    failure = Event("failure", 0, 1 << 30, 0, "numpy", "", SITES[2], -1, 0, 1, 0, 2)
    assert str(freed) == ('size_mismatch of 2.00 KiB (freed as 100 bytes) at 0x1000, rmm, tag "load", sim.py:9, cuda:1')
    assert str(failure) == "failure of 1.00 GiB, numpy, native, host"
    history = History((freed, *[failure] * 11), 3)
    assert repr(history) == "<History: 11 failure, 1 size_mismatch; 3 older ones dropped>"
    lines = str(history).splitlines()
    assert lines[:2] == [repr(history), "  ... 2 before these; print(history.events) shows all"]
    assert lines[2:] == [f"  {failure}"] * 10
