"""Invariants 1, 5 and 6: every block goes back to the pool that gave it, once, and nothing else goes anywhere."""

import ctypes
import threading

import pytest
from fake_cuda import PER_THREAD, FakeCuda
from fake_cuda.pool import KIB, MIB, Bench

from rmm_managed_bridge._native import blocks, ledger
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.errors import BridgeError, ForeignPointerError

pytestmark = pytest.mark.fake_driver


def counters() -> dict[str, int]:
    """Return the process-wide counters by name."""
    names = ("current_bytes", "peak_bytes", "foreign_frees", "size_mismatches", "failures", "ledger_bytes")
    return dict(zip(names, ledger.counters(), strict=False))


def test_a_block_goes_back_to_the_pool_that_gave_it(fake: FakeCuda) -> None:
    """Invariant 1, also when it is freed through another heap, and after its own was retired."""
    first, second = Bench(fake), Bench(fake)
    stream = first.owned()
    ptr = first.allocate(MIB, stream)
    first.heap.retire()
    assert not first.heap.closed, "a pool lives until its last block dies"
    before = second.heap.numbers
    second.heap.deallocate(ptr, MIB)
    first.live.clear()
    assert second.heap.numbers == before
    assert first.heap.live_count == 0
    assert first.close() and second.close()


@pytest.mark.behaviour("S1")
@pytest.mark.parametrize("stated", [512, 0, 1 << 63])
def test_the_recorded_size_wins(bench: Bench, stated: int) -> None:
    """S1: a free that states another size is one mismatch with both sizes and the block's provenance."""
    stream = bench.owned()
    ptr = bench.heap.allocate(4096, stream=stream.handle, framework="cupy")
    record = ledger.allocation_of(ptr)
    before = counters()
    bench.heap.deallocate(ptr, stated, stream=stream.handle)
    assert counters()["size_mismatches"] == before["size_mismatches"] + 1
    assert counters()["current_bytes"] == before["current_bytes"] - 4096
    event = ledger.history().events[-1]
    assert (event.action, event.requested_bytes, event.stated_bytes) == ("size_mismatch", 4096, stated)
    assert (event.framework, event.serial, event.site) == ("cupy", record.serial, record.site)
    for _ in range(2):
        bench.allocate(4096, stream)  # overlap is checked there


@pytest.mark.behaviour("S2")
def test_a_pointer_that_is_no_live_block_goes_nowhere(bench: Bench) -> None:
    """S2: a heap pointer, a block freed before, an interior pointer; each counted, none touching the driver."""
    stream = bench.owned()
    live = bench.allocate(4096, stream)
    dead, _ = bench.used_and_freed(4096, stream)
    large = bench.allocate(16 * MIB, cpu=True)
    outside = ctypes.create_string_buffer(64)
    before, numbers = counters(), bench.heap.numbers
    bench.fake.clear()
    wrong = [ctypes.addressof(outside), dead, live + 64, large + 4096, large + 15 * MIB]
    for ptr in wrong:
        with pytest.raises(ForeignPointerError):
            bench.heap.deallocate(ptr, 4096, stream=stream.handle)
    assert counters()["foreign_frees"] == before["foreign_frees"] + len(wrong)
    assert counters()["current_bytes"] == before["current_bytes"]
    assert bench.heap.numbers == numbers
    assert bench.fake.trace() == []
    assert ledger.history().events[-1].action == "foreign_free"


@pytest.mark.behaviour("S2")
@pytest.mark.parametrize("size", [0, 64])
def test_freeing_null_does_nothing(bench: Bench, size: int) -> None:
    before = counters()
    bench.heap.deallocate(0, size)
    bench.heap.deallocate(0, size, stream=bench.owned().handle)
    assert counters() == before


def test_a_double_free_while_the_block_is_in_quarantine(bench: Bench) -> None:
    stream = bench.owned()
    array = bench.allocate(MIB, cpu=True)
    bench.expose(array, stream)
    operation = bench.fake.enqueue(stream)
    bench.free(array)
    with pytest.raises(ForeignPointerError):
        bench.heap.deallocate(array)
    assert not blocks.record_stream(array, stream.handle)
    assert not blocks.order(array, stream.handle)
    bench.fake.finish(operation)
    with pytest.raises(ForeignPointerError):
        bench.heap.deallocate(array)


@pytest.mark.behaviour("S3")
def test_no_bytes_take_nothing_and_leave_no_record(bench: Bench) -> None:
    """S3, the allocator's part: the null pointer, on either device, with no driver call."""
    other = Bench(bench.fake, device=1)
    serials = {a.serial for a in ledger.snapshot().allocations}
    bench.fake.clear()
    for each in (bench, other):
        for stream in (None, 0, 2):
            assert each.heap.allocate(0, stream=stream) == 0
            each.heap.deallocate(0, 0, stream=stream)
        assert each.heap.numbers[:4] == (0, 0, 0, 0) and each.heap.live_count == 0
    assert {a.serial for a in ledger.snapshot().allocations} == serials
    assert bench.fake.trace() == []
    assert other.close()


@pytest.mark.behaviour("D1")
@pytest.mark.parametrize("current", [0, 1, None])
def test_work_on_one_device_does_not_land_on_another(fake: FakeCuda, current: int | None) -> None:
    """D1: memory of device 1, asked for and freed by threads whose current device is 0, 1 or none."""
    first, second = Bench(fake, device=0), Bench(fake, device=1)
    stream = second.owned()
    fake.set_current(current)
    before = first.heap.numbers, first.heap.live_bytes
    ptr = second.allocate(MIB, stream)
    assert ledger.allocation_of(ptr).device == 1
    operation = fake.enqueue(stream)
    depth, ended = [], []

    def free() -> None:
        fake.set_current(current)
        second.free(ptr, stream)
        second.heap.trim()
        array = second.allocate(MIB, cpu=True)
        second.order(array, stream)
        blocks.synchronize(array)
        second.free(array)
        depth.append(fake.lib.fake_context_depth())
        ended.append(native_process.current_device())

    thread = threading.Thread(target=free)
    thread.start()
    thread.join()
    assert (first.heap.numbers, first.heap.live_bytes) == before
    assert second.heap.live_bytes == 0 and fake.done(operation)
    assert ended == [-1 if current is None else current] and depth == [0 if current is None else 1]
    fake.set_current(0)
    assert first.close() and second.close()


def test_a_thread_without_a_context_may_free_and_allocate(fake: FakeCuda) -> None:
    """NumPy's workers have none: the pool brings its own for events, and takes it away again."""
    bench = Bench(fake, limit_bytes=16 * MIB)
    giver, taker = bench.owned(), bench.borrowed()
    fake.set_current(None)
    used, operation = bench.used_and_freed(16 * MIB, giver)
    assert bench.allocate(16 * MIB, taker) == used
    assert fake.ordered(operation, taker)
    bench.free(used, taker)
    mine = fake.ambient(PER_THREAD)
    assert bench.allocate(16 * MIB, mine) == used, "though the driver knows no such stream without a context"
    bench.free(used, mine)
    assert bench.allocate(16 * MIB) == used
    assert fake.lib.fake_current() == -1
    fake.set_current(0)
    assert bench.close()


def test_a_ledger_entry_is_there_exactly_while_the_block_is(bench: Bench) -> None:
    """Invariant 5, seen from outside: live bytes, counts and records move together."""
    stream = bench.owned()
    start = counters()["current_bytes"]
    sizes = [1, 64, 4 * KIB, 100_000, 3 * MIB]
    blocks = [bench.allocate(size, stream if size % 2 else None) for size in sizes]
    for ptr, size in zip(blocks, sizes, strict=True):
        record = ledger.allocation_of(ptr + size - 1)
        assert (record.ptr, record.requested_bytes, record.kind) == (ptr, size, "managed")
    assert counters()["current_bytes"] == start + sum(sizes)
    assert (bench.heap.live_bytes, bench.heap.live_count) == (sum(sizes), len(sizes))
    for ptr in blocks:
        bench.free(ptr)
        assert ledger.allocation_of(ptr) is None
    assert counters()["current_bytes"] == start
    assert (bench.heap.live_bytes, bench.heap.live_count) == (0, 0)


def test_a_failed_allocation_changes_nothing(fake: FakeCuda) -> None:
    """Invariant 10: the error says what was asked and what is reserved; the next request that fits is served."""
    bench = Bench(fake, limit_bytes=4 * MIB)
    keep = bench.allocate(MIB)
    before = bench.heap.numbers, bench.heap.live_bytes, counters()["current_bytes"]
    with pytest.raises(MemoryError, match=r"cannot allocate 8.00 MiB.*live.*reserved"):
        bench.allocate(8 * MIB)
    assert (bench.heap.numbers, bench.heap.live_bytes, counters()["current_bytes"]) == before
    assert counters()["failures"] > 0
    assert bench.allocate(MIB) != keep
    assert bench.close()


FALLIBLE = [
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamWaitEvent",
    "cuStreamGetId",
]


@pytest.mark.parametrize("function", FALLIBLE)
@pytest.mark.parametrize("owned", [True, False])
def test_a_driver_that_fails_makes_no_block_unsafe(fake: FakeCuda, function: str, owned: bool) -> None:
    """Whatever fails in freeing and stealing, unfinished memory is not handed out."""
    bench = Bench(fake, limit_bytes=16 * MIB)
    stream, taker = (bench.owned() if owned else bench.borrowed()), bench.borrowed()
    ptr = bench.allocate(16 * MIB, stream)
    operation = fake.enqueue(stream)
    fake.fail(function, skip=1 if function == "cuStreamGetId" else 0)
    bench.free(ptr, stream)
    for other in (taker, None):
        try:
            assert bench.allocate(16 * MIB, other) == ptr
        except (MemoryError, BridgeError):
            continue
        assert fake.done(operation) if other is None else fake.ordered(operation, other)
        bench.free(ptr, other)
    bench.close()
