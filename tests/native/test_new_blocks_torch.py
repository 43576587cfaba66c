"""The installed preset where no Python is asked: new blocks of PyTorch, on the fake driver."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_cuda import GLOBAL, LEGACY, PER_THREAD, RELAXED, THREAD_LOCAL, FakeCuda, Prefetch
from fake_cuda.hints import FakeHints, hints_counted, using_installed
from fake_cuda.pool import MIB, Bench

import rmm_managed_bridge as bridge
from rmm_managed_bridge import Hints, HintSkip
from rmm_managed_bridge._native import hint_table, torch_entry
from rmm_managed_bridge.hints.pages import outwards

pytestmark = pytest.mark.fake_driver

MODES = [GLOBAL, THREAD_LOCAL, RELAXED]


@pytest.fixture(autouse=True)
def counts_at_zero(hints: FakeHints) -> None:
    """Each test reads `bridge.stats()` from zero, and asks where blocks are by way of the fake."""


@pytest.fixture(params=["torch", "torch pool"])
def torch(request: pytest.FixtureRequest, bench: Bench) -> Callable[..., int]:
    """Allocate as PyTorch does, for each tensor or for a segment of its `MemPool`; with `heap`, from that one."""
    guest = torch_entry.TorchEntry(lambda handle, device: None)
    guest.use(0, bench.heap)
    guest.use(1, None)

    def malloc(size_bytes: int, stream: int, *, device: int = 0, heap: Any = None) -> int:
        if heap is not None:
            guest.use(device, heap)
        ptr = int(guest.malloc(size_bytes, device, stream, pool=request.param == "torch pool"))
        if heap is None and ptr:
            bench.live[ptr] = size_bytes, None  # freed with the bench
        return ptr

    return malloc


def test_a_block_of_pytorch_is_prefetched_on_its_stream(bench: Bench, torch: Callable[..., int]) -> None:
    stream = bench.owned()
    before = torch(4 * MIB, stream.handle)
    with using_installed("device"):
        ptr, small = torch(4 * MIB, stream.handle), torch(MIB - 1, stream.handle)
        on_legacy = torch(4 * MIB, LEGACY)
        of_thread = torch(4 * MIB, PER_THREAD)
    after = torch(4 * MIB, stream.handle)
    assert bench.fake.prefetches() == [
        Prefetch(ptr, 4 * MIB, 0, stream.handle, 0),
        Prefetch(on_legacy, 4 * MIB, 0, LEGACY, 0),
        Prefetch(of_thread, 4 * MIB, 0, PER_THREAD, 0),
    ]
    assert hints_counted() == ({"prefetch": 3}, {})
    assert (bridge.residency(ptr).asked, bridge.residency(ptr).last_prefetch) == ("cuda:0", "cuda:0")
    assert {bridge.residency(block).asked for block in (before, small, after)} == {None}


def test_the_least_size_is_that_of_the_preset(bench: Bench, torch: Callable[..., int]) -> None:
    with using_installed("device:2MiB"):
        torch(2 * MIB - 1, LEGACY)
        assert bench.fake.calls("cuMemPrefetchAsync") == 0
        ptr = torch(2 * MIB, LEGACY)
    with using_installed(Hints("device", min_bytes=0)):
        assert torch(0, LEGACY) == 0
    assert [each.low for each in bench.fake.prefetches()] == [ptr]
    assert hints_counted() == ({"prefetch": 1}, {}), "what is too small was not asked for, so it is not skipped"


def test_a_small_block_is_prefetched_with_all_of_its_pages(bench: Bench, torch: Callable[..., int]) -> None:
    with using_installed(Hints("device", min_bytes=1)):
        blocks = [torch(5000, LEGACY) for _ in range(4)]
    expected = [outwards(ptr, 5000) for ptr in blocks]
    assert [(each.low, each.low + each.size_bytes) for each in bench.fake.prefetches()] == expected
    assert any(low != ptr for ptr, (low, _) in zip(blocks, expected, strict=True))


@pytest.mark.parametrize("preset", ["host", "read_mostly", "none"])
def test_the_other_presets_do_nothing_for_new_blocks(bench: Bench, torch: Callable[..., int], preset: str) -> None:
    with using_installed(preset):
        torch(4 * MIB, LEGACY)
    assert bench.fake.calls("cuMemPrefetchAsync") == bench.fake.calls("cuMemAdvise") == 0
    assert hints_counted() == ({}, {})


def test_contexts_and_tags_are_not_seen_where_there_is_no_gil(bench: Bench, torch: Callable[..., int]) -> None:
    with bridge.using_hints("device"), bridge.tag("new blocks", hints="device"):
        torch(4 * MIB, LEGACY)
        assert bench.fake.prefetches() == []
    with using_installed("device"), bridge.using_hints("none"), bridge.tag("old blocks", hints="none"):
        torch(4 * MIB, LEGACY)
    assert len(bench.fake.prefetches()) == 1


def test_another_install_says_what_counts_and_uninstall_ends_it(bench: Bench, torch: Callable[..., int]) -> None:
    for hints, count in (("device:8MiB", 0), ("device", 1), ("none", 1)):
        with using_installed(hints):
            torch(4 * MIB, LEGACY)
            assert len(bench.fake.prefetches()) == count
    torch(16 * MIB, LEGACY)
    assert len(bench.fake.prefetches()) == 1


def test_the_device_and_its_context_are_those_of_the_pool(fake: FakeCuda, torch: Callable[..., int]) -> None:
    """On a thread without a context, as PyTorch's autograd threads are, and on one where another is current."""
    other = Bench(fake, device=1)
    stream, blocks = other.owned(), []

    def without_a_context() -> None:
        fake.set_current(None)
        blocks.append(torch(4 * MIB, stream.handle, device=1, heap=other.heap))
        assert fake.lib.fake_context_depth() == 0

    with using_installed("device"):
        thread = threading.Thread(target=without_a_context)
        thread.start()
        thread.join()
        blocks.append(torch(4 * MIB, LEGACY, device=1, heap=other.heap))
    assert fake.prefetches() == [
        Prefetch(ptr, 4 * MIB, 1, handle, 1) for ptr, handle in zip(blocks, (stream.handle, LEGACY), strict=True)
    ]
    assert (fake.lib.fake_current(), fake.lib.fake_context_depth()) == (0, 1)
    for ptr in blocks:
        other.heap.deallocate(ptr)
    assert other.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_captured_stream_gets_no_block_and_no_prefetch(bench: Bench, torch: Callable[..., int], mode: int) -> None:
    captured, other = bench.owned(), bench.owned()
    with using_installed("device"):
        torch(40 * MIB, other.handle)
        bench.fake.begin_capture(captured, mode)
        with pytest.raises(RuntimeError, match="being captured"):
            torch(4 * MIB, captured.handle)
        elsewhere = torch(4 * MIB, other.handle)
        assert bench.fake.end_capture(captured)
    assert [each.low for each in bench.fake.prefetches()][1:] == [elsewhere]
    assert hints_counted() == ({"prefetch": 2}, {})


@pytest.mark.parametrize("mode", MODES)
def test_the_legacy_stream_is_left_alone_while_a_blocking_one_is_captured(
    bench: Bench, torch: Callable[..., int], mode: int
) -> None:
    """Its blocks may be had then, which costs no call that it bars; a prefetch there would end the capture."""
    captured = bench.owned(blocking=True)
    with using_installed("device"):
        bench.fake.begin_capture(captured, mode)
        ptr = torch(4 * MIB, LEGACY)
        assert bench.fake.end_capture(captured)
    assert bench.fake.prefetches() == []
    assert hints_counted() == ({}, {HintSkip.CAPTURING: 1})
    assert bridge.residency(ptr).asked is None


def test_a_driver_that_refuses_does_not_stop_the_allocation(bench: Bench, torch: Callable[..., int]) -> None:
    with using_installed("device"):
        bench.fake.fail("cuMemPrefetchAsync")
        ptr = torch(4 * MIB, LEGACY)
        assert ptr and bridge.residency(ptr).asked is None
        assert hints_counted() == ({}, {HintSkip.REFUSED: 1})
        torch(4 * MIB, LEGACY)
    assert hints_counted() == ({"prefetch": 1}, {HintSkip.REFUSED: 1})


def test_a_device_without_concurrent_access_is_not_asked(fake: FakeCuda, torch: Callable[..., int]) -> None:
    exclusive = Bench(fake, concurrent=False)
    with using_installed("device"):
        ptr = torch(4 * MIB, LEGACY, heap=exclusive.heap)
    assert fake.calls("cuMemPrefetchAsync") == 0
    assert hints_counted() == ({}, {HintSkip.NO_CONCURRENT_ACCESS: 1})
    exclusive.heap.deallocate(ptr)
    assert exclusive.close()


@pytest.mark.parametrize(
    ("kind", "reason"), [("system", HintSkip.NOT_MANAGED), ("device", HintSkip.NOT_MANAGED), ("host", HintSkip.HOST)]
)
def test_other_kinds_of_memory_are_not_prefetched(
    fake: FakeCuda, torch: Callable[..., int], make_heap: Any, kind: str, reason: HintSkip
) -> None:
    heap = make_heap(kind=kind, device=0, ordered=True)
    with using_installed("device"):
        ptr = torch(4 * MIB, LEGACY, heap=heap)
    assert fake.calls("cuMemPrefetchAsync") == 0
    assert hints_counted() == ({}, {reason: 1})
    heap.deallocate(ptr)


def test_what_is_larger_than_the_device_is_left_at_home(bench: Bench, torch: Callable[..., int]) -> None:
    bench.fake.set_memory(64 * MIB)
    with using_installed("device"):
        torch(64 * MIB + 1, LEGACY)
        ptr = torch(64 * MIB, LEGACY)
    bench.fake.set_memory(1 << 36)
    assert [each.low for each in bench.fake.prefetches()] == [ptr]
    assert hints_counted() == ({"prefetch": 1}, {HintSkip.LARGER_THAN_DEVICE: 1})


def test_where_a_block_was_asked_to_be_ends_with_it(bench: Bench, torch: Callable[..., int]) -> None:
    stream = bench.owned()
    with using_installed("device"):
        ptr = torch(4 * MIB, stream.handle)
    bench.free(ptr)
    assert torch(4 * MIB, stream.handle) == ptr
    assert bridge.residency(ptr).asked is None


def test_no_lock_is_held_while_the_driver_prefetches(bench: Bench, torch: Callable[..., int]) -> None:
    """The driver's call takes the table's lock, and the pool's, itself here: with either held it would never end."""
    other = bench.allocate(8 * MIB, cpu=True)

    def inside() -> None:
        hint_table.place(other, 0)
        bench.heap.deallocate(bench.heap.allocate(1024, stream=LEGACY))

    bench.fake.on_call("cuMemPrefetchAsync", inside)
    with using_installed("device"):
        torch(4 * MIB, LEGACY)
    assert bridge.residency(other).asked == "cuda:0"
