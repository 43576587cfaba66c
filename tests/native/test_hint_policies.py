"""Policies on the fake driver: what the bridge asks for by itself when memory is made and handed over."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import GLOBAL, LEGACY, RELAXED, THREAD_LOCAL, FakeCuda, Page
from fake_cuda.hints import FakeHints, Reached, using_installed
from fake_cuda.pool import MIB, Bench
from helpers import stub_cupy, stub_warp

import rmm_managed_bridge as bridge
from rmm_managed_bridge import Hints
from rmm_managed_bridge.adapters.warp import WarpAllocator
from rmm_managed_bridge.hints import policy

pytestmark = pytest.mark.fake_driver


class Stream:
    """A stream of CuPy's."""

    __module__ = "cupy.cuda.stream"

    def __init__(self, handle: int) -> None:
        self.ptr = handle


@pytest.fixture
def cupy(fake: FakeCuda, bench: Bench, hints: FakeHints, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stub of CuPy, on a stream of its own; NumPy's arrays of the test are in the fake's managed pool."""
    stub = stub_cupy.put_in_place(monkeypatch)
    stub.stream = Stream(fake.stream().handle)
    monkeypatch.setattr(policy, "_of_tag", {})
    with bridge.numpy_allocator("managed"):
        yield stub


def extent(array: Any) -> tuple[int, int]:
    return array.ctypes.data, array.ctypes.data + array.nbytes


def test_without_hints_nothing_is_asked(cupy: Any, hints: FakeHints) -> None:
    array = np.ones(MIB)
    bridge.as_numpy(bridge.as_cupy(array))
    assert hints.reached == [] and bridge.stats().hints_done == {}


def test_device_prefetches_on_the_consumers_stream_and_home_again(cupy: Any, hints: FakeHints) -> None:
    array = np.ones(MIB)
    with bridge.using_hints("device"):
        there = bridge.as_cupy(array)
        assert hints.reached == [Reached("prefetch", (extent(array),), 0, cupy.stream.ptr)]
        bridge.as_numpy(there)
        assert hints.reached[1:] == [Reached("prefetch", (extent(array),), -1, cupy.stream.ptr)]
        bridge.as_numpy(array)
        assert len(hints.reached) == 2, "it is at home"
        bridge.as_cupy(array)
        bridge.as_numpy(array)
    assert [call.place for call in hints.reached] == [0, -1, 0, -1]
    assert bridge.stats().hints_done == {"prefetch": 4}


def test_the_wait_of_as_numpy_includes_the_way_home(cupy: Any, hints: FakeHints, fake: FakeCuda) -> None:
    """The move is enqueued first, on a stream that the block is then waited for on."""
    array = np.ones(MIB)
    with bridge.using_hints("device"):
        bridge.as_cupy(array)
        operation = fake.enqueue(fake.ambient(cupy.stream.ptr))
        fake.clear()
        bridge.as_numpy(array)
    assert fake.done(operation)
    assert fake.trace().index("cuMemPrefetchAsync") < fake.trace().index("cuEventSynchronize")


def test_the_way_home_comes_after_the_work_of_all_streams_on_the_block(
    cupy: Any, hints: FakeHints, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that went home before a kernel ends would be fetched back by it."""
    array, other = np.ones(MIB), bench.owned()
    seen: list[bool] = []

    def prefetch(ranges: Any, place: int, handle: int) -> None:
        seen.append(place == -1 and bench.fake.ordered(operation, bench.fake.ambient(handle)))
        FakeHints.prefetch(hints, ranges, place, handle)

    with bridge.using_hints("device"):
        there = bridge.as_cupy(array)
        bridge.record_stream(there, other.handle)
        operation = bench.fake.enqueue(other)
        monkeypatch.setattr(hints, "prefetch", prefetch)
        bridge.as_numpy(there)
    assert seen == [True]


def test_small_arrays_are_left_alone_and_less_than_4_mib_does_not_go_home(cupy: Any, hints: FakeHints) -> None:
    small, middle = np.ones(1000), np.ones(2 * MIB, "u1")
    with bridge.using_hints(Hints("device", min_bytes="2MiB")):
        bridge.as_numpy(bridge.as_cupy(small))
        assert hints.reached == []
        bridge.as_numpy(bridge.as_cupy(middle))
        assert [call.place for call in hints.reached] == [0]
        bridge.as_cupy(middle[: MIB - 1])
        assert len(hints.reached) == 1, "the size of what is handed over counts"


def test_host_keeps_the_pages_at_home_and_asks_once(cupy: Any, hints: FakeHints, fake: FakeCuda) -> None:
    array = np.ones(MIB)
    with bridge.using_hints(Hints.host):
        for _ in range(2):
            bridge.as_numpy(bridge.as_cupy(array))
    pages = (extent(array),)
    assert hints.reached == [Reached("SET_PREFERRED_LOCATION", pages, -1), Reached("SET_ACCESSED_BY", pages, 0)]
    address = array.ctypes.data
    del array
    assert fake.page(address) == Page(), "it ends with the array"


def test_read_mostly_copies_and_keeps_the_original(cupy: Any, hints: FakeHints) -> None:
    table = np.ones(MIB)
    with bridge.using_hints("read_mostly"):
        for _ in range(2):
            bridge.as_numpy(bridge.as_cupy(table))
    assert [call.what for call in hints.reached] == ["SET_READ_MOSTLY", "prefetch", "prefetch"]
    assert {call.place for call in hints.reached if call.what == "prefetch"} == {0}


def test_new_blocks_of_cupy_are_prefetched_and_numpys_are_not(cupy: Any, hints: FakeHints, bench: Bench) -> None:
    from rmm_managed_bridge.adapters.cupy import _allocator

    guest, _ = _allocator()
    guest.use(0, bench.heap)
    with bridge.using_hints("device:1MiB"):
        np.ones(MIB)
        ptr, small = guest.malloc(4 * MIB, 0), guest.malloc(1000, 0)
    without = guest.malloc(4 * MIB, 0)
    assert hints.reached == [Reached("prefetch", ((ptr, ptr + 4 * MIB),), 0, cupy.stream.ptr)]
    for block in (ptr, small, without):
        guest.free(block, 0)
    guest.use(0, None)


def test_new_blocks_of_warp_are_prefetched(cupy: Any, hints: FakeHints, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_warp.put_in_place(monkeypatch, 1)
    allocator = WarpAllocator()
    with bridge.using_hints("device"):
        ptr = allocator.allocate(4 * MIB)
        small = allocator.allocate(100)
    assert hints.reached == [Reached("prefetch", ((ptr, ptr + 4 * MIB),), 0, LEGACY)]
    allocator.deallocate(ptr, 4 * MIB)
    allocator.deallocate(small, 100)


def test_a_device_that_warp_is_still_setting_up_gives_blocks_on_the_legacy_stream(
    cupy: Any, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no stream for a moment, which another thread that uses it for the first time may meet."""
    stub_warp.put_in_place(monkeypatch, 1).devices[0].stream = None
    allocator = WarpAllocator()
    ptr = allocator.allocate(1000)
    assert ptr and bridge.allocation_of(ptr).stream == LEGACY
    allocator.deallocate(ptr, 1000)


def test_a_hint_that_fails_does_not_stop_an_allocation_or_a_view(cupy: Any, hints: FakeHints, fake: FakeCuda) -> None:
    array = np.ones(MIB)
    with bridge.using_hints("device"):
        fake.fail("cuMemPrefetchAsync")
        there = bridge.as_cupy(array)
        fake.fail("cuMemPrefetchAsync")
        assert bridge.as_numpy(there)[5] == 1
    assert bridge.stats().hints_skipped == {bridge.HintSkip.REFUSED: 2}


def test_install_the_context_and_tags_in_order_of_who_counts(cupy: Any, hints: FakeHints) -> None:
    def asked(array: Any) -> list[str]:
        hints.reached.clear()
        bridge.as_cupy(array)
        return [call.what for call in hints.reached]

    with using_installed("device"), bridge.numpy_allocator("managed"):
        assert bridge.status().hints == "device from 1.00 MiB"
        plain = np.ones(MIB)
        with bridge.tag("tables", hints="read_mostly"):
            table = np.ones(MIB)
            with bridge.tag("inner"):
                inner = np.ones(MIB)
            with bridge.tag("scratch", hints=Hints.none):
                scratch = np.ones(MIB)
        assert asked(plain) == ["prefetch"]
        assert asked(table) == asked(inner) == ["SET_READ_MOSTLY", "prefetch"]
        assert asked(scratch) == []
        with bridge.using_hints("none"):
            assert asked(plain) == asked(table) == []
            with bridge.using_hints("device"):
                assert asked(scratch) == ["prefetch"]
            assert asked(plain) == []
        assert asked(plain) == ["prefetch"]
    assert asked(plain) == [], "what install said ends with uninstall"
    assert bridge.status().hints == "none"


def test_the_hints_of_a_context_do_not_reach_other_threads(cupy: Any, hints: FakeHints) -> None:
    array = np.ones(MIB)
    mine = bridge.using_hints("device")
    with mine:
        thread = threading.Thread(target=lambda: (cupy.cuda, hints.fake.set_current(0), bridge.as_cupy(array)))
        thread.start()
        thread.join()
        assert hints.reached == []
        with mine:  # one object may be entered again
            pass
        bridge.as_cupy(array)
    assert len(hints.reached) == 1


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("hints_in_use", ["device", "host", "read_mostly"])
def test_hand_overs_during_a_capture_leave_it_alone(
    cupy: Any, hints: FakeHints, bench: Bench, hints_in_use: str, mode: int
) -> None:
    captured, array = bench.owned(blocking=True), np.ones(MIB)
    with bridge.using_hints(hints_in_use):
        bench.fake.begin_capture(captured, mode)
        there = bridge.as_cupy(array)
        assert hints.reached, "another stream than the captured one takes hints"
        bridge.as_numpy(there)
        cupy.stream = Stream(captured.handle)
        with pytest.raises(bridge.BridgeError, match="make views before the capture"):
            bridge.as_cupy(np.ones(MIB))
    assert bench.fake.end_capture(captured)


@pytest.mark.parametrize("value", ["devices", "device:big", "", 5, None, ("device",)])
def test_hints_that_are_none_are_an_error(value: Any) -> None:
    with pytest.raises(bridge.ConfigError):
        bridge.using_hints(value)
    with pytest.raises(bridge.ConfigError):
        Hints(value)


def test_blocks_are_only_reported_while_somebody_wants_to_know(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_noted_bytes", None)
    policy.set_installed(Hints.none)
    assert not policy.wants_to_know(1 << 40)
    policy.set_installed(Hints("device", min_bytes=3 * MIB))
    assert [policy.wants_to_know(size) for size in (2 * MIB, 3 * MIB)] == [False, True]
    with bridge.using_hints("device:8MiB"):
        policy.set_installed(Hints.none)
    assert [policy.wants_to_know(size) for size in (7 * MIB, 8 * MIB)] == [False, True], "another context may use them"
