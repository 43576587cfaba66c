"""Totals, peaks, failures and the history: M1, M6, P4."""

import contextlib
import random
import threading
from typing import Any

import numpy as np
import pytest
from helpers.programs import recorded_events

import rmm_managed_bridge as bridge
from rmm_managed_bridge.records import Usage

MIB = 1 << 20
# `np.empty` throughout: `np.ones` also makes small temporary arrays, which count like any other.


@pytest.mark.behaviour("M1")
def test_a_hopeless_request_fails_cleanly_and_leaves_a_record() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        before = bridge.stats()
        with bridge.tag("hopeless"), recorded_events(100):
            for _ in range(10):
                with pytest.raises(MemoryError):
                    np.empty(1 << 50, "u1")
            failures = [event for event in bridge.history() if event.action == "failure"]
        after = bridge.stats()
        assert (after.current_bytes, after.current_count) == (before.current_bytes, before.current_count)
        assert after.failures == before.failures + 10
        assert len(failures) == 10
        for event in failures:
            assert (event.requested_bytes, event.framework, event.tag) == (1 << 50, "numpy", "hopeless")
            assert (event.site.file, event.stream, event.thread) == (__file__, 0, threading.get_native_id())
        assert bridge.owns(np.empty(MIB, "u1"))


@pytest.mark.behaviour("M1")
def test_a_failure_is_in_the_history_when_its_exception_arrives(host_heap: Any) -> None:
    try:
        host_heap.allocate(1 << 50)
    except MemoryError as error:
        event = bridge.history().events[-1]
        assert (event.action, event.requested_bytes) == ("failure", 1 << 50)
        assert "1.00 PiB" in str(error)
    else:
        pytest.fail("1 PiB was allocated")


TAGS = ("m6-red", "m6-green", "m6-blue")


@pytest.mark.behaviour("M6")
def test_a_hundred_thousand_operations_add_up_to_the_event_log(host_heap: Any) -> None:
    dice = random.Random(20261129)
    live: list[tuple[int, int]] = []
    live_bytes = 0
    start = {name: _usage("tag", name) for name in TAGS}
    with recorded_events(100_000):
        allocations = 0
        for _ in range(100_000):
            size_bytes = int(2 ** dice.uniform(0, 22))
            if live and (dice.random() < 0.5 or live_bytes + size_bytes > 64 * MIB):
                index = dice.randrange(len(live))
                live[index], live[-1] = live[-1], live[index]
                ptr, freed_bytes = live.pop()
                host_heap.deallocate(ptr, freed_bytes)
                live_bytes -= freed_bytes
            else:
                with bridge.tag(dice.choice(TAGS)):
                    ptr = host_heap.allocate(size_bytes, framework=dice.choice(["numpy", "warp"]))
                live.append((ptr, size_bytes))
                live_bytes += size_bytes
                allocations += 1
        history = bridge.history()
    assert len(history) == 100_000
    assert history.events[-1].time_ns >= history.events[0].time_ns
    assert sum(event.action == "allocate" for event in history) == allocations

    # The log, played back, is what every counter says.
    playing: dict[int, Any] = {}
    total: dict[str, list[int]] = {name: [0, 0] for name in TAGS}
    for event in history:
        if event.action == "allocate":
            assert event.serial not in playing
            playing[event.serial] = event
            total[event.tag][0] += event.requested_bytes
            total[event.tag][1] += 1
        else:
            assert (event.action, playing.pop(event.serial).ptr) == ("deallocate", event.ptr)
    assert sorted((event.ptr, event.requested_bytes) for event in playing.values()) == sorted(live)
    assert sorted((each.ptr, each.requested_bytes) for each in bridge.snapshot()) == sorted(live)
    for name in TAGS:
        usage = _usage("tag", name)
        held = [event for event in playing.values() if event.tag == name]
        assert usage.current_bytes == sum(event.requested_bytes for event in held)
        assert usage.current_count == len(held)
        assert usage.total_bytes - start[name].total_bytes == total[name][0]
        assert usage.total_count - start[name].total_count == total[name][1]
        assert usage.peak_bytes >= usage.current_bytes
    stats = bridge.stats()
    assert stats.current_bytes == live_bytes == host_heap.live_bytes
    for key in ("framework", "device", "kind", "tag", "site"):
        assert sum(usage.current_bytes for usage in stats.by(key).values()) == live_bytes  # type: ignore[arg-type]
        assert sum(usage.total_count for usage in stats.by(key).values()) == stats.total_count  # type: ignore[arg-type]
    assert stats.reserved_bytes >= stats.cached_bytes + live_bytes
    assert stats.peak_bytes >= live_bytes

    for ptr, size_bytes in live:
        host_heap.deallocate(ptr, size_bytes)
    assert bridge.stats().current_bytes == 0
    assert {name: _usage("tag", name).current_bytes for name in TAGS} == dict.fromkeys(TAGS, 0)


def _usage(key: Any, name: str) -> Any:
    return bridge.stats().by(key).get(name, Usage(0, 0, 0, 0, 0))


@pytest.mark.behaviour("M6")
def test_peak_scopes_measure_inside_and_a_reset_starts_from_what_is_live() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        assert bridge.stats().current_bytes == 0
        with bridge.peak_scope() as outer:
            assert outer.peak_bytes == 0
            passing = np.empty(64 * MIB, "u1")
            del passing
            kept = np.empty(8 * MIB, "u1")
            with bridge.peak_scope() as inner:
                assert inner.peak_bytes == 8 * MIB
                with bridge.tag("m6-inner"):
                    added = np.empty(32 * MIB, "u1")
                assert inner.peak_bytes == 40 * MIB
            bridge.reset_peak()
            assert bridge.stats().peak_bytes == 40 * MIB
            peak = bridge.snapshot().peak
            assert (peak.current_bytes, peak.by("tag")["m6-inner"]) == (40 * MIB, 32 * MIB)
            del kept, added
        assert (inner.peak_bytes, outer.peak_bytes) == (40 * MIB, 64 * MIB)
        assert bridge.stats().peak_bytes == 40 * MIB
        bridge.reset_peak()
        assert bridge.stats().peak_bytes == 0


@pytest.mark.behaviour("M6")
def test_the_peak_tells_who_held_it_after_they_let_go() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        bridge.reset_peak()
        with bridge.tag("m6-first"):
            first = np.empty(3 * MIB, "u1")
        with bridge.tag("m6-second"):
            second = np.empty(5 * MIB, "u1")
        del first, second
        later = np.empty(MIB, "u1")
        peak = bridge.snapshot().peak
        assert peak.current_bytes == 8 * MIB
        assert peak.by("tag") == {"m6-second": 5 * MIB, "m6-first": 3 * MIB}
        assert [holder.current_count for holder in peak.top(5)] == [1, 1]
        del later


@pytest.mark.behaviour("M6")
def test_peaks_are_right_to_256_kib_with_several_threads_and_exact_with_one(host_heap: Any) -> None:
    """Threads count apart and tell each other in steps: what one has not told must not stay in another's peaks."""
    live: list[list[int]] = [[] for _ in range(16)]

    def grow(mine: list[int]) -> None:
        mine += [host_heap.allocate(1000) for _ in range(500)]

    def shrink(mine: list[int]) -> None:
        while mine:
            host_heap.deallocate(mine.pop())

    bridge.reset_peak()
    for work in (grow, shrink):
        threads = [threading.Thread(target=work, args=(mine,)) for mine in live]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    stats = bridge.stats()
    assert stats.current_bytes == 0
    assert abs(stats.peak_bytes - 16 * 500 * 1000) <= 256 << 10
    bridge.reset_peak()
    for size_bytes in (5, 40_000, 70_000):
        host_heap.deallocate(host_heap.allocate(size_bytes))
        assert bridge.stats().peak_bytes == size_bytes


def test_the_peak_of_a_holder_is_its_own_whatever_threads_it_has(host_heap: Any) -> None:
    """Threads count apart, but of those that hold 16 MiB one after another none adds to the peak."""

    def hold(together: threading.Barrier | None = None) -> None:
        ptr = host_heap.allocate(16 * MIB)
        if together is not None:
            together.wait()
        host_heap.deallocate(ptr, 16 * MIB)

    def peak_of(threads: list[threading.Thread], *, at_once: bool) -> int:
        bridge.reset_peak()
        for thread in threads:
            thread.start()
            if not at_once:
                thread.join()
        for thread in threads:
            thread.join()
        return max(usage.peak_bytes for _, usage in bridge.stats().holders)

    assert peak_of([threading.Thread(target=hold) for _ in range(20)], at_once=False) == 16 * MIB
    together = threading.Barrier(4)
    assert peak_of([threading.Thread(target=hold, args=[together]) for _ in range(4)], at_once=True) == 64 * MIB
    bridge.reset_peak()
    for size_bytes in (100, 3_000, 500, 2 * MIB + 1, 700):
        host_heap.deallocate(host_heap.allocate(size_bytes), size_bytes)
    assert max(usage.peak_bytes for _, usage in bridge.stats().holders) == 2 * MIB + 1


def test_more_peak_scopes_than_there_are_is_an_error_that_changes_nothing() -> None:
    scopes = [bridge.peak_scope().__enter__() for _ in range(64)]
    with pytest.raises(bridge.BridgeError, match="leave one"), bridge.peak_scope():
        pass
    for scope in scopes:
        scope.__exit__(None, None, None)
    with bridge.peak_scope() as again:
        assert again.peak_bytes == bridge.stats().current_bytes


@pytest.mark.behaviour("P4")
def test_the_history_keeps_the_newest_and_counts_what_it_dropped(host_heap: Any) -> None:
    with recorded_events(1_000):
        dropped = bridge.history().dropped_count
        for _ in range(10_000):
            host_heap.deallocate(host_heap.allocate(4096), 4096)
        history = bridge.history()
        assert len(history) == 1_000
        assert history.dropped_count - dropped == 19_000
        serials = [event.serial for event in history]
        assert serials == sorted(serials)
        assert len(set(serials)) == 500
        last = host_heap.allocate(4096)
        assert bridge.history().events[-1].serial == serials[-1] + 1
        host_heap.deallocate(last)


@pytest.mark.behaviour("P4")
def test_a_shorter_history_keeps_the_newest_and_none_keeps_nothing(host_heap: Any) -> None:
    with recorded_events(100):
        blocks = [host_heap.allocate(64) for _ in range(10)]
        serials = [event.serial for event in bridge.history()]
        bridge.record_events(3)
        assert [event.serial for event in bridge.history()] == serials[-3:]
        bridge.record_events(0)
        for block in blocks:
            host_heap.deallocate(block)
        assert len(bridge.history()) == 0
        with pytest.raises(bridge.ConfigError, match="0 to 10000000 events"):
            bridge.record_events(-1)


@pytest.mark.behaviour("P4")
@pytest.mark.parametrize(("track", "site", "seen"), [("counters", "not recorded", True), ("off", None, False)])
def test_less_tracking_records_less(track: str, site: str | None, seen: bool) -> None:
    with bridge.installed("host", frameworks=["numpy"], track=track), bridge.tag("p4"):
        before = bridge.stats()
        array = np.empty(MIB, "u1")
        after = bridge.stats()
        with contextlib.nullcontext() if seen else pytest.warns(bridge.BridgeWarning, match="was not recorded"):
            record = bridge.allocation_of(array)
        assert bridge.owns(array)
        assert after.track == track
        assert (after.total_count - before.total_count, record is not None) == (int(seen), seen)
        assert record is None or (record.site.file, record.tag, record.requested_bytes) == (site, "p4", MIB)
        del array
        assert bridge.stats().current_count == 0


def test_a_peak_scope_is_entered_once_at_a_time() -> None:
    scope = bridge.peak_scope()
    with scope, pytest.raises(bridge.ConfigError, match="entered already"), scope:
        pass
    with scope:
        assert scope.peak_bytes >= 0


def test_resizing_without_tracking_keeps_the_live_bytes_right(make_heap: Any) -> None:
    heap = make_heap(track="off")
    from rmm_managed_bridge._native import numpy_handler

    handler = numpy_handler.NumpyHandler()
    handler.use(heap)
    ptr = handler.malloc(100)
    for size in (5_000, 70, 3 << 20, 64):
        ptr = handler.realloc(ptr, size)
        assert size <= heap.live_bytes < 2 * size + 64
    handler.free(ptr)
    assert heap.live_bytes == 0
    handler.use(None)
