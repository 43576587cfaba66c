"""Hints on the fake driver: A1, A2, shared pages, captures, discard, and a device that runs full."""

import os
from typing import Any

import numpy as np
import pytest
from fake_cuda import GLOBAL, LEGACY, RELAXED, THREAD_LOCAL, FakeCuda, Page
from fake_cuda.hints import FakeHints, Reached
from fake_cuda.pool import MIB, Bench
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rmm_managed_bridge as bridge
from rmm_managed_bridge import HintSkip, machine
from rmm_managed_bridge._native import process as native_process

pytestmark = pytest.mark.fake_driver

PAGE = os.sysconf("SC_PAGE_SIZE")
CONCURRENT_MANAGED_ACCESS = 89
SKIPPED_BY_ITS_KIND = {"host": HintSkip.HOST, "device": HintSkip.NOT_MANAGED, "pinned": HintSkip.NOT_MANAGED}


class DeviceArray:
    """An array of no framework that the bridge knows, as the CUDA array interface shows it."""

    def __init__(
        self, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, of: str = "<f8"
    ) -> None:
        self.__cuda_array_interface__ = {
            "data": (ptr, False),
            "shape": shape,
            "strides": strides,
            "typestr": of,
            "version": 3,
        }


def pages_of(ptr: int, size_bytes: int) -> tuple[int, int]:
    return ptr // PAGE * PAGE, -(-(ptr + size_bytes) // PAGE) * PAGE


@pytest.fixture
def eight(bench: Bench) -> int:
    """Return a managed block of 8 MiB."""
    return bench.allocate(8 * MIB, cpu=True)


@pytest.mark.behaviour("A1")
def test_a_prefetch_is_one_call_and_can_be_read_back(hints: FakeHints, eight: int) -> None:
    array = DeviceArray(eight, (MIB,))
    for to, place, name in (("cpu", -1, "cpu"), (0, 0, "cuda:0"), ("cuda:1", 1, "cuda:1")):
        hints.reached.clear()
        result = bridge.prefetch(array, to)
        assert result and result.reason is None and result.sharing_count == 0
        assert (result.ptr, result.size_bytes) == (eight, 8 * MIB)
        assert hints.reached == [Reached("prefetch", ((eight, eight + 8 * MIB),), place, LEGACY)]
        assert (bridge.residency(array).asked, bridge.residency(array).last_prefetch) == (name, name)
    assert bridge.stats().hints_done == {"prefetch": 3} and bridge.stats().hints_skipped == {}


@pytest.mark.behaviour("A1")
def test_a_prefetch_of_a_slice_is_rounded_outwards(hints: FakeHints, eight: int) -> None:
    piece = DeviceArray(eight + 8 * 1000, (1000,))
    assert bridge.prefetch(piece, 0)
    assert hints.reached[-1].ranges == (pages_of(eight + 8000, 8000),)
    assert bridge.residency(piece).last_prefetch == "cuda:0"
    assert bridge.residency(eight).last_prefetch is None, "the driver answers for all pages or not at all"
    assert bridge.residency(eight).asked == "cuda:0"


@pytest.mark.behaviour("A1")
def test_an_array_with_holes_counts_from_its_lowest_to_its_highest_byte(hints: FakeHints, eight: int) -> None:
    backwards = DeviceArray(eight + 100_000, (10, 20), (-8000, 16))
    assert bridge.prefetch(backwards, 0)
    low, end = eight + 100_000 - 9 * 8000, eight + 100_000 + 19 * 16 + 8
    assert hints.reached[-1].ranges == (pages_of(low, end - low),)


SIX_FORMS: dict[str, tuple[dict[str, Any], Reached]] = {
    "read mostly": ({"read_mostly": True}, Reached("SET_READ_MOSTLY", (), -1)),
    "not read mostly": ({"read_mostly": False}, Reached("UNSET_READ_MOSTLY", (), -1)),
    "preferred": ({"preferred_location": 0}, Reached("SET_PREFERRED_LOCATION", (), 0)),
    "not preferred": ({"preferred_location": None}, Reached("UNSET_PREFERRED_LOCATION", (), -1)),
    "accessed by": ({"accessed_by": [1]}, Reached("SET_ACCESSED_BY", (), 1)),
    "not accessed by": ({"accessed_by": None}, Reached("UNSET_ACCESSED_BY", (), 0)),
}


@pytest.mark.behaviour("A1")
@pytest.mark.parametrize("form", SIX_FORMS)
def test_each_form_of_advice_is_one_call(hints: FakeHints, eight: int, form: str) -> None:
    arguments, expected = SIX_FORMS[form]
    result = bridge.advise(eight, **arguments)
    assert result and result.size_bytes == 8 * MIB
    assert hints.reached == [expected._replace(ranges=((eight, eight + 8 * MIB),))]
    assert bridge.stats().hints_done == {"advise": 1}


@pytest.mark.behaviour("A1")
def test_advice_can_be_read_back_and_taken_back(hints: FakeHints, bench: Bench, eight: int) -> None:
    assert bridge.advise(eight, read_mostly=True, preferred_location="cpu", accessed_by=(0, 1))
    found = bridge.residency(eight)
    assert (found.read_mostly, found.preferred_location, found.accessed_by) == (True, "cpu", ("cuda:0", "cuda:1"))
    assert bridge.advise(eight, accessed_by=1)
    assert bridge.residency(eight).accessed_by == ("cuda:1",)
    assert bridge.advise(eight, read_mostly=False, preferred_location=None, accessed_by=None)
    assert bench.fake.page(eight) == Page()
    bench.fake.clear()
    bench.free(eight)
    assert bench.fake.calls("cuMemAdvise") == 0, "there is nothing left to undo"


def test_advice_on_one_slice_is_not_forgotten_when_that_on_another_is_taken_back(
    bench: Bench, hints: FakeHints
) -> None:
    block = bench.allocate(8 * MIB, cpu=True)
    bridge.advise((block, MIB), read_mostly=True)
    bridge.advise((block + 4 * MIB, MIB), read_mostly=True)
    bridge.advise((block, MIB), read_mostly=False)
    bench.free(block)
    assert bench.fake.page(block + 4 * MIB) == Page()


def test_a_list_is_one_call_with_a_result_for_each(hints: FakeHints, bench: Bench, eight: int) -> None:
    other = bench.allocate(MIB, cpu=True)
    stream = bench.borrowed()
    result = bridge.prefetch([eight, np.empty(0), (other, 5000)], 0, stream.handle)
    assert not result and result.reason == HintSkip.EMPTY
    assert [bool(part) for part in result.parts] == [True, False, True]
    ranges = ((eight, eight + 8 * MIB), pages_of(other, 5000))
    assert hints.reached == [Reached("prefetch", ranges, 0, stream.handle)]
    assert result.size_bytes == sum(high - low for low, high in ranges)
    assert bridge.stats().hints_done == {"prefetch": 2} and bridge.stats().hints_skipped == {HintSkip.EMPTY: 1}
    assert bridge.prefetch([eight, other], 0)
    assert bridge.prefetch((eight, other), 0).reason == HintSkip.FOREIGN, "two integers are an address and a size"


@pytest.mark.behaviour("A2")
@pytest.mark.parametrize("kind", SKIPPED_BY_ITS_KIND)
def test_hints_on_other_kinds_of_memory_are_skipped(
    fake: FakeCuda, hints: FakeHints, make_heap: Any, kind: str
) -> None:
    heap = make_heap(kind=kind, device=-1 if kind == "host" else 0)
    ptr = heap.allocate(8 * MIB)
    fake.clear()
    for result in (bridge.prefetch(ptr, 0), bridge.advise(ptr, read_mostly=True), bridge.discard(ptr)):
        assert not result and result.reason == SKIPPED_BY_ITS_KIND[kind]
    assert bridge.residency(ptr).reason == SKIPPED_BY_ITS_KIND[kind]
    assert fake.calls() == 0 and hints.reached == []
    assert bridge.stats().hints_skipped == {SKIPPED_BY_ITS_KIND[kind]: 3}
    heap.deallocate(ptr)


@pytest.mark.behaviour("A2")
def test_hints_on_no_bytes_and_on_foreign_memory_are_skipped(fake: FakeCuda, hints: FakeHints, eight: int) -> None:
    foreign = np.frombuffer(bytearray(1 << 16), "u1")
    fake.clear()
    for x, reason in (
        (np.empty((3, 0)), HintSkip.EMPTY),
        ((eight, 0), HintSkip.EMPTY),
        (foreign, HintSkip.FOREIGN),
        ((eight, 9 * MIB), HintSkip.FOREIGN),
        (0, HintSkip.FOREIGN),
    ):
        for result in (bridge.prefetch(x, "cpu"), bridge.advise(x, read_mostly=True), bridge.discard(x)):
            assert not result and result.reason == reason
    assert fake.calls() == 0 and hints.reached == []
    assert bridge.stats().hints_skipped == {HintSkip.EMPTY: 6, HintSkip.FOREIGN: 9}


@pytest.mark.behaviour("A2")
def test_hints_for_a_device_without_concurrent_access_are_skipped(hints: FakeHints, bench: Bench, eight: int) -> None:
    bench.fake.set_attribute(1, CONCURRENT_MANAGED_ACCESS, 0)
    for result in (
        bridge.prefetch(eight, 1),
        bridge.advise(eight, preferred_location=1),
        bridge.advise(eight, accessed_by=[0, 1]),
    ):
        assert not result and result.reason == HintSkip.NO_CONCURRENT_ACCESS
    assert bridge.prefetch(eight, 0)
    bench.fake.set_attribute(0, CONCURRENT_MANAGED_ACCESS, 0)
    machine.device_traits.cache_clear()
    hints.reached.clear()
    for result in (bridge.prefetch(eight, "cpu"), bridge.advise(eight, read_mostly=True), bridge.discard(eight)):
        assert not result and result.reason == HintSkip.NO_CONCURRENT_ACCESS
    assert hints.reached == []
    assert bridge.stats().hints_skipped == {HintSkip.NO_CONCURRENT_ACCESS: 6}


def test_what_the_driver_refuses_is_a_reason_and_not_an_error(hints: FakeHints, bench: Bench, eight: int) -> None:
    for function, give in (
        ("cuMemPrefetchAsync", lambda **o: bridge.prefetch(eight, 0, **o)),
        ("cuMemAdvise", lambda **o: bridge.advise(eight, read_mostly=True, **o)),
        ("cuMemDiscardBatchAsync", lambda **o: bridge.discard(eight, **o)),
    ):
        bench.fake.fail(function)
        result = give()
        assert not result and result.reason == HintSkip.REFUSED and "ERROR_999" in str(result)
        bench.fake.fail(function)
        with pytest.raises(bridge.BridgeError, match="the driver refused"):
            give(strict=True)
    assert bridge.residency(eight).asked is None, "a prefetch that was refused is not where it was asked to be"


def test_strict_raises_what_would_be_skipped(hints: FakeHints, eight: int) -> None:
    with pytest.raises(bridge.BridgeError, match="no bytes"):
        bridge.prefetch([eight, np.empty(0)], 0, strict=True)
    with pytest.raises(bridge.BridgeError, match="nothing was asked"):
        bridge.advise(eight, strict=True)
    assert bridge.prefetch(eight, 0, strict=True)


@pytest.mark.parametrize("to", ["gpu", "cuda:99", "cpu:0", -1, 2.5, None, True, "cuda:x"])
def test_a_place_that_is_none_is_an_error(hints: FakeHints, eight: int, to: Any) -> None:
    with pytest.raises(bridge.ConfigError, match=r"is not a place for memory|does not exist"):
        bridge.prefetch(eight, to)


def test_a_device_that_does_not_exist_is_an_error(hints: FakeHints, eight: int) -> None:
    with pytest.raises(bridge.ConfigError, match="device 7 does not exist; there are 2"):
        bridge.prefetch(eight, 7)
    with pytest.raises(bridge.ViewError, match="has no address"):
        bridge.prefetch(object(), 0)


def test_pages_that_are_shared_are_said_to_be(hints: FakeHints, bench: Bench) -> None:
    blocks = [bench.allocate(1024, cpu=True) for _ in range(8)]
    page = blocks[1] // PAGE
    others = sum(block // PAGE == page for block in blocks) - 1
    assert others >= 2
    assert bridge.prefetch(blocks[1], 0).sharing_count == others
    assert bridge.advise(blocks[1], read_mostly=True).sharing_count == others
    bench.free(blocks[2])
    assert bridge.prefetch(blocks[1], 0).sharing_count == others - (blocks[2] // PAGE == page)


@pytest.mark.parametrize("blocking", [False, True], ids=["non-blocking", "blocking"])
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_hints_during_a_capture_leave_it_alone(hints: FakeHints, bench: Bench, mode: int, blocking: bool) -> None:
    """Skipped on the capturing stream, and on the legacy one that a captured blocking stream bars; given elsewhere."""
    captured, other = bench.owned(blocking=blocking), bench.owned()
    block, used = bench.allocate(8 * MIB, cpu=True), bench.allocate(8 * MIB, captured)
    bench.fake.begin_capture(captured, mode)
    for to in ("cpu", 0):
        assert bridge.prefetch(block, to, captured.handle).reason == HintSkip.CAPTURING
        assert bridge.prefetch(block, to, other.handle)
        assert bridge.prefetch(block, to, LEGACY).reason == (HintSkip.CAPTURING if blocking else None)
    assert bridge.advise(block, read_mostly=True, accessed_by=0)
    assert bridge.discard(used).reason == HintSkip.UNORDERED
    bridge.discard(block)
    bridge.residency(block)
    assert bench.fake.lib.fake_thread_mode() == GLOBAL and bench.fake.lib.fake_context_depth() == 1
    assert bench.fake.end_capture(captured)


def test_a_stream_that_the_driver_does_not_know_is_not_used(hints: FakeHints, bench: Bench, eight: int) -> None:
    hints.fake.fail("cuStreamGetId", result=400)
    assert bridge.prefetch(eight, 0, bench.borrowed().handle).reason == HintSkip.BAD_STREAM
    assert hints.reached == []


def test_discard_comes_after_the_work_on_the_block_and_before_its_next_owner(
    hints: FakeHints, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = bench.owned()
    block = bench.allocate(8 * MIB, cpu=True)
    bench.order(block, stream)
    operation = bench.fake.enqueue(stream)
    seen: list[bool] = []

    def discard(pages: tuple[int, int], handle: int) -> None:
        seen.append(bench.fake.ordered(operation, bench.fake.ambient(handle)))
        FakeHints.discard(hints, pages, handle)

    monkeypatch.setattr(hints, "discard", discard)
    assert bridge.discard(block) and seen == [True]
    assert bench.fake.done(operation), "the CPU may use the array at once, so it waits"
    assert bench.fake.page(block).discarded
    bench.fake.enqueue(bench.fake.ambient(hints.reached[-1].stream))  # stands for a discard that is not done yet
    bench.free(block)
    assert bench.allocate(8 * MIB, cpu=True) != block, "the next owner's bytes would be lost"


def test_discard_rounds_inwards_and_skips_less_than_a_page(hints: FakeHints, bench: Bench, eight: int) -> None:
    assert bridge.discard((eight + 100, 3 * PAGE))
    assert hints.reached[-1].ranges == ((eight + PAGE, eight + 3 * PAGE),)
    result = bridge.discard((eight + 100, PAGE))
    assert not result and result.reason == HintSkip.LESS_THAN_A_PAGE
    small = bench.allocate(1024, cpu=True)
    assert bridge.discard(small).reason == HintSkip.LESS_THAN_A_PAGE


def test_discard_leaves_arrays_with_holes_alone(hints: FakeHints, eight: int) -> None:
    every_other = DeviceArray(eight, (100_000,), (16,))
    columns = DeviceArray(eight, (100, 50), (8 * 1000, 8))
    assert bridge.discard([every_other, columns]).parts[0].reason == HintSkip.HOLES
    assert hints.reached == []
    turned = DeviceArray(eight + 8 * 99_999, (100, 1000), (-8, -800))
    assert bridge.discard(turned)
    assert hints.reached[-1].ranges == ((eight, (eight + 800_000) // PAGE * PAGE),)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_discard_never_touches_a_byte_of_anything_else(hints: FakeHints, fake: FakeCuda, data: st.DataObject) -> None:
    """Whatever is discarded, of blocks that share pages: every byte of the pages is an element of the array."""
    bench = Bench(fake)
    try:
        sizes = data.draw(st.lists(st.sampled_from([1000, 5000, 12_288, 40_000]), min_size=1, max_size=5))
        blocks = [(bench.allocate(size, cpu=True), size) for size in sizes]
        block, size = data.draw(st.sampled_from(blocks))
        whole = np.arange(block, block + size, dtype="i8")  # the address of each byte
        rows = data.draw(st.integers(1, 8))
        table = whole[: size // rows * rows].reshape(rows, -1)
        index = st.slices(table.shape[0]), st.slices(table.shape[1])
        piece = table[data.draw(index[0]), data.draw(index[1])]
        if data.draw(st.booleans()):
            piece = piece.T
        strides = tuple(step // 8 for step in piece.strides)  # one byte for each of the eight of an address
        first = int(piece.flat[0]) if piece.size else block
        hints.reached.clear()
        result = bridge.discard(DeviceArray(first, piece.shape, strides, "|u1"))
        mine = set(piece.ravel().tolist())
        for low, high in (pages for each in hints.reached for pages in each.ranges):
            assert set(range(low, high)) <= mine
        if result:
            assert not result.reason and hints.reached
    finally:
        bench.close()


@pytest.mark.behaviour("M4")
def test_a_pool_may_outgrow_the_device_and_hints_follow(hints: FakeHints, fake: FakeCuda) -> None:
    """M4 (a), with hints: what was not needed any more is let go, and only the rest is written back."""
    fake.set_memory(64 * MIB)
    bench = Bench(fake)
    blocks = [bench.allocate(8 * MIB, cpu=True) for _ in range(12)]
    for number, block in enumerate(blocks):
        assert bridge.prefetch(block, 0)
        if number % 2 == 0:
            assert bridge.discard(block)
    written_back, let_go = fake.pushed_out()
    assert (written_back, let_go) == (16 * MIB, 16 * MIB)
    assert [fake.page(block).resident for block in blocks] == [-1] * 4 + [0] * 8
    fake.set_memory(1 << 36)
    bench.close()


def test_what_is_larger_than_the_device_is_not_prefetched_to_it(hints: FakeHints, bench: Bench) -> None:
    bench.fake.set_memory(64 * MIB)
    block = bench.allocate(96 * MIB, cpu=True)
    assert bridge.prefetch(block, 0).reason == HintSkip.LARGER_THAN_DEVICE
    assert bridge.prefetch((block, 64 * MIB), 0)
    assert bridge.prefetch(block, "cpu")
    assert bridge.advise(block, preferred_location="cpu", accessed_by=0), "rarely used: it stays at home"
    bench.fake.set_memory(1 << 36)


def test_a_process_that_is_ending_gives_no_hints(hints: FakeHints, eight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_process, "phase", lambda: "exiting")
    for result in (bridge.prefetch(eight, 0), bridge.advise(eight, read_mostly=True), bridge.discard(eight)):
        assert result.reason == HintSkip.ENDED
    assert hints.reached == []
