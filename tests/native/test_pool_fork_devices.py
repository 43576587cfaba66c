"""What a forked child finds of blocks that devices use, and what that does to the devices: L8."""

import ctypes
import threading
from collections.abc import Iterator

import pytest
from fake_cuda import Stream, build
from fake_cuda.calls import Driver
from fake_cuda.pool import MIB, Bench
from helpers.forked import in_forked_child
from helpers.managed_numpy import Managed, counted, read_dies
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.lifecycle import forks

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
COPY = "cuMemcpyDtoHAsync"


@pytest.fixture
def managed(bench: Bench) -> Iterator[Managed]:
    with bridge.installed("host", frameworks=["numpy"]):
        yield Managed(bench)


def on_both_sides(bench: Bench, stream: Stream, size_bytes: int = 3 * MIB) -> int:
    """Return a block of the device's that was shown to the CPU, as `as_numpy` does."""
    ptr = bench.allocate(size_bytes, stream)
    ctypes.memset(ptr, 7, size_bytes)
    assert bench.blocks.hand_over(ptr, stream.handle, bench.blocks.CPU)
    return ptr


def sevens(ptr: int, size_bytes: int = 3 * MIB) -> None:
    assert ctypes.string_at(ptr, size_bytes) == b"\7" * size_bytes


def is_there(ptr: int) -> bool:
    return not native_process.lost_in_fork(ptr, 3 * MIB)


def child_has(ptr: int) -> bool:
    return in_forked_child(lambda: sevens(ptr)) == ""


@pytest.mark.behaviour("L8")
def test_what_a_device_has_is_copied_from_there_and_stays_there(managed: Managed) -> None:
    bench = managed.bench
    stream = bench.owned()
    ptr, array = on_both_sides(bench, stream), managed.full(MIB, 1)
    bench.fake.clear()
    assert Driver(str(build())).prefetch(ptr, 3 * MIB, stream.handle) == 0
    before = bench.fake.prefetches()
    assert bench.fake.page(ptr).resident == 0

    def action() -> None:
        sevens(ptr)
        assert array.sum() == MIB

    assert in_forked_child(action) == ""
    assert bench.fake.calls(COPY) == 1
    assert bench.fake.page(ptr).resident == 0 and bench.fake.prefetches() == before

    with counted() as risen:
        assert child_has(ptr)
        assert risen()[2] == 0, "nothing has changed"
        ctypes.memset(ptr + MIB, 8, 1)
        assert not child_has(ptr)
        assert risen()[2] == 4096
    assert bench.fake.page(ptr).resident == 0 and bench.fake.prefetches() == before


@pytest.mark.behaviour("L8")
def test_a_large_block_comes_in_pieces_and_the_pinned_memory_for_them_goes(
    managed: Managed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = managed.bench
    ptr = on_both_sides(bench, bench.owned(), 70 * MIB)
    monkeypatch.setattr(forks, "KEEP_MS", 1)
    bench.fake.clear()
    assert in_forked_child(lambda: sevens(ptr, 70 * MIB)) == ""
    assert bench.fake.calls(COPY) == 3
    assert eventually(lambda: bench.fake.calls("cuMemFreeHost") == 1)
    assert bench.fake.calls("cuMemHostAlloc") <= 1


@pytest.mark.behaviour("L8")
def test_an_array_that_a_stream_was_shown_is_copied_by_the_driver(managed: Managed) -> None:
    bench = managed.bench
    array, other = managed.full(MIB, 1), managed.full(MIB, 2)
    stream = bench.owned()
    bench.expose(array.ctypes.data, stream)
    operation = bench.fake.enqueue(stream, host=True)
    bench.fake.clear()

    def action() -> None:
        assert array.sum() == MIB and other.sum() == 2 * MIB

    assert in_forked_child(action) == ""
    assert bench.fake.done(operation), "the fork waits for the work, and not with the GIL"
    assert bench.fake.calls(COPY) == 1


@pytest.mark.behaviour("L8")
def test_a_block_of_devices_alone_is_not_there_and_an_error_says_so(managed: Managed) -> None:
    ptr = managed.bench.allocate(MIB, managed.bench.owned())
    array = managed.full(MIB, 1)
    calls = managed.bench.fake.calls(COPY)
    assert read_dies(ptr)
    assert managed.bench.fake.calls(COPY) == calls

    class OnDevice:
        @property
        def __cuda_array_interface__(self) -> object:
            return {"shape": (MIB,), "typestr": "|u1", "data": (ptr, False), "version": 3}

    def action() -> None:
        with pytest.raises(bridge.ViewError, match="not copied for it"):
            bridge.as_numpy(OnDevice())
        with pytest.raises(bridge.BridgeError, match="not copied for it"):
            bridge.allocation_of(OnDevice())
        assert bridge.as_numpy(array) is array and bridge.allocation_of(array) is None

    assert in_forked_child(action) == ""


@pytest.mark.behaviour("L8")
def test_a_block_that_shares_a_page_with_what_is_there_is_not_there(managed: Managed) -> None:
    bench, stream = managed.bench, managed.bench.owned()
    blocks = [on_both_sides(bench, stream, 512) if number % 2 else bench.allocate(512, stream) for number in range(8)]
    arrays = [managed.full(64, number) for number in range(8)]
    busy = bench.owned()
    bench.expose(arrays[3].ctypes.data, busy)
    bench.fake.begin_capture(busy)

    def action() -> None:
        lost = [native_process.lost_in_fork(ptr, 512) for ptr in blocks]
        assert lost == [True, False] * 4
        sevens(blocks[1], 512)
        assert bench.blocks.hand_over(blocks[1], stream.handle, bench.blocks.CPU)
        lost = [native_process.lost_in_fork(each.ctypes.data, 512) for each in arrays]
        assert lost == [number == 3 for number in range(8)]
        with pytest.raises(MemoryError):
            arrays[3].resize(100, refcheck=False)
        arrays[4].resize(100, refcheck=False)
        assert arrays[4][:64].tolist() == [4] * 64

    with pytest.warns(bridge.BridgeWarning, match="without 1 arrays"):
        assert in_forked_child(action) == ""
    assert bench.fake.end_capture(busy)


@pytest.mark.behaviour("L8")
def test_an_array_that_was_not_copied_is_refused_in_a_child(managed: Managed) -> None:
    array = managed.full(MIB, 1)

    def action() -> None:
        with pytest.raises(bridge.ViewError, match="not copied for it"):
            bridge.as_numpy(array)
        with pytest.raises(MemoryError):
            array.resize(2 * MIB, refcheck=False)

    with pytest.warns(bridge.BridgeWarning, match="SIGSEGV"), managed.forks("warn"):
        assert in_forked_child(action) == ""


@pytest.mark.behaviour("L8")
def test_work_that_does_not_end_is_waited_for_a_while_and_its_block_left_out(
    managed: Managed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, stream = managed.bench, managed.bench.owned()
    ptr, array = on_both_sides(bench, stream), managed.full(MIB, 1)
    bench.fake.enqueue(stream)
    bench.fake.hang()
    monkeypatch.setattr(forks, "PATIENCE_MS", 50)
    with pytest.warns(bridge.BridgeWarning, match=f"without 1 arrays .3.00 MiB.*{ptr:#x}.*has not ended"):
        assert in_forked_child(lambda: expect(array.sum() == MIB)) == ""
    with pytest.warns(bridge.BridgeWarning):
        assert read_dies(ptr)
    bench.fake.clear()
    bench.fake.finish_all()
    assert child_has(ptr)


@pytest.mark.behaviour("L8")
def test_what_a_capture_uses_is_left_out_and_the_capture_stays_valid(managed: Managed) -> None:
    bench, stream, other = managed.bench, managed.bench.owned(), managed.bench.owned()
    ptr, free = on_both_sides(bench, stream), on_both_sides(bench, other)
    array = managed.full(MIB, 1)
    bench.fake.begin_capture(stream)
    with pytest.warns(bridge.BridgeWarning, match="without 1 arrays.*is being captured"):
        assert in_forked_child(lambda: (sevens(free), expect(array.sum() == MIB))) == ""
    assert bench.fake.end_capture(stream)
    assert child_has(ptr)


@pytest.mark.behaviour("L8")
def test_a_stream_that_nobody_holds_cannot_be_waited_for(managed: Managed) -> None:
    ptr = managed.bench.allocate(MIB, cpu=True)
    managed.bench.expose(ptr, managed.bench.borrowed())
    with pytest.warns(bridge.BridgeWarning, match="does not hold"):
        assert read_dies(ptr)


@pytest.mark.behaviour("L8")
def test_a_driver_that_refuses_the_copy_costs_one_block(managed: Managed) -> None:
    bench = managed.bench
    first, second = (on_both_sides(bench, bench.owned()) for _ in range(2))
    bench.fake.fail(COPY)
    with pytest.warns(bridge.BridgeWarning, match="without 1 arrays.*driver failed"):
        assert in_forked_child(lambda: expect(sum(map(is_there, (first, second))) == 1)) == ""
    assert child_has(first) and child_has(second)


@pytest.mark.behaviour("L8")
def test_nothing_goes_back_to_upstream_while_a_fork_copies(managed: Managed) -> None:
    bench = managed.bench
    ptr = on_both_sides(bench, bench.owned())
    piece = bench.allocate(80 * MIB, cpu=True)  # a piece of its own
    before, while_it_copies = bench.reserved_bytes, []
    trimmed = threading.Event()

    def trim() -> None:
        bench.heap.trim()
        trimmed.set()

    def free_elsewhere() -> None:
        bench.free(piece)
        thread.start()
        while_it_copies.append(trimmed.wait(0.1))

    thread = threading.Thread(target=trim)
    bench.fake.on_call(COPY, free_elsewhere)
    assert child_has(ptr)
    thread.join()
    assert while_it_copies == [False]
    assert bench.reserved_bytes <= before - 80 * MIB


@pytest.mark.behaviour("L8")
def test_blocks_of_two_devices(managed: Managed) -> None:
    second = Bench(managed.bench.fake, device=1)
    here, there = on_both_sides(managed.bench, managed.bench.owned()), on_both_sides(second, second.owned())
    assert in_forked_child(lambda: (sevens(here), sevens(there))) == ""
    assert second.close()


@pytest.mark.behaviour("L8")
def test_where_the_cpu_must_wait_for_all_of_a_device_nothing_is_copied(managed: Managed) -> None:
    exclusive = Bench(managed.bench.fake, concurrent=False)
    ptr = exclusive.allocate(MIB, cpu=True)
    with pytest.warns(bridge.BridgeWarning, match="does not share memory"):
        assert read_dies(ptr)
    exclusive.free(ptr)
    assert exclusive.close()


def expect(true: bool) -> None:
    assert true
