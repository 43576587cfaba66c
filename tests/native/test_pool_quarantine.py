"""The quarantine's limit: an allocation waits a while for what is in there, and never for ever."""

import pytest
from fake_cuda import FakeCuda
from fake_cuda.pool import MIB, Bench

from rmm_managed_bridge.errors import BridgeWarning

pytestmark = pytest.mark.fake_driver


def held_back(bench: Bench, size: int) -> int:
    """Free a block that a view showed to a stream with unfinished work; return the operation."""
    stream = bench.owned()
    ptr = bench.allocate(size, cpu=True)
    bench.expose(ptr, stream)
    operation = bench.fake.enqueue(stream)
    bench.free(ptr)
    return operation


def test_beyond_the_limit_an_allocation_waits_for_the_oldest_work(fake: FakeCuda) -> None:
    bench = Bench(fake, quarantine_limit_bytes=32 * MIB, patience_ms=60_000)
    operation = held_back(bench, 48 * MIB)
    reserved = bench.reserved_bytes
    fake.on_call("cuEventQuery", lambda: fake.finish(operation))
    bench.allocate(48 * MIB, cpu=True)
    assert bench.reserved_bytes == reserved, "it did not take more memory"
    assert bench.close()


def test_work_that_does_not_end_is_waited_for_once_and_said(fake: FakeCuda) -> None:
    bench = Bench(fake, quarantine_limit_bytes=32 * MIB, patience_ms=1)
    held_back(bench, 48 * MIB)
    with pytest.warns(BridgeWarning, match="48.0 MiB of freed memory wait for device work that has not ended") as said:
        first = bench.allocate(48 * MIB, cpu=True)
        fake.clear()
        second = bench.allocate(48 * MIB, cpu=True)
    assert first != second
    assert fake.calls("cuEventQuery") <= 2, "one look for what has finished, and no second wait"
    assert len(said) == 1
    assert bench.close()


def test_below_the_limit_nothing_waits(fake: FakeCuda) -> None:
    bench = Bench(fake, quarantine_limit_bytes=64 * MIB, patience_ms=60_000)
    held_back(bench, 48 * MIB)
    bench.allocate(48 * MIB, cpu=True)
    assert bench.ledger.take_pending_warnings() == []
    assert bench.close()


def test_the_wait_releases_the_gil(fake: FakeCuda) -> None:
    """A Python function on the stream ends only if it gets the GIL."""
    bench = Bench(fake, quarantine_limit_bytes=32 * MIB, patience_ms=60_000)
    stream = bench.owned()
    ptr = bench.allocate(48 * MIB, cpu=True)
    bench.expose(ptr, stream)
    operation = fake.enqueue(stream, host=True)
    bench.free(ptr)
    fake.on_call("cuEventQuery", lambda: fake.finish(operation))  # Python: it needs the GIL
    bench.allocate(48 * MIB, cpu=True)
    assert bench.close()


@pytest.mark.parametrize("ordering", ["cautious", "recorded"])
def test_only_recorded_streams_are_waited_for_if_that_was_chosen(fake: FakeCuda, ordering: str) -> None:
    bench = Bench(fake, ordering=ordering)
    shown, other = bench.owned(), bench.owned()
    ptr = bench.allocate(MIB, cpu=True)
    bench.expose(ptr, shown)
    mine, theirs = fake.enqueue(shown), fake.enqueue(other)
    bench.free(ptr)
    assert ptr not in [bench.allocate(MIB, cpu=True) for _ in range(4)]
    fake.finish(mine)
    assert (ptr in [bench.allocate(MIB, cpu=True) for _ in range(64)]) == (ordering == "recorded")
    fake.finish(theirs)
    assert bench.close()


@pytest.mark.behaviour("M4")
def test_without_a_limit_a_managed_pool_may_outgrow_the_device(fake: FakeCuda) -> None:
    """Managed memory may: the driver moves pages out. Only more than all memory there is is refused unasked."""
    from rmm_managed_bridge._native import pool as native_pool
    from rmm_managed_bridge._native import process as native_process

    fake.set_memory(64 * MIB)
    heap = native_pool.host_pool(ordered=True, device=0, kind="managed")
    blocks = [heap.allocate(8 * MIB, cpu=True) for _ in range(12)]
    assert heap.numbers[0] >= 96 * MIB
    with pytest.raises(MemoryError, match="cannot allocate"):
        heap.allocate(native_process.physical_bytes() + MIB)
    for ptr in blocks:
        heap.deallocate(ptr)
    assert heap.retire()
    fake.set_memory(64 << 30)


def test_a_wait_ends_though_a_capture_holds_back_older_memory(fake: FakeCuda) -> None:
    """What was freed in a capture got no event then; one that is recorded later stands behind it as well."""
    bench = Bench(fake, limit_bytes=32 * MIB)
    stream = bench.owned()
    first, second = (bench.allocate(16 * MIB, cpu=True) for _ in range(2))
    for ptr in (first, second):
        bench.expose(ptr, stream)
    fake.begin_capture(stream)
    bench.free(first)
    assert fake.end_capture(stream)
    operation = fake.enqueue(stream)
    bench.free(second)
    fake.begin_capture(stream)
    fake.finish(operation)
    assert {bench.allocate(16 * MIB, cpu=True) for _ in range(2)} == {first, second}
    assert fake.end_capture(stream)
    assert bench.close()
