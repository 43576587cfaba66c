"""Invariant 4: what reuse costs in driver calls; and invariant 7: nobody waits for the device with the GIL held."""

import threading

import pytest
from fake_cuda import LEGACY, PER_THREAD, FakeCuda
from fake_cuda.pool import MIB, Bench

pytestmark = pytest.mark.fake_driver

AFFORDABLE = {"cuStreamIsCapturing"}


@pytest.mark.parametrize("state_stream", [True, False])
@pytest.mark.parametrize("kind", ["owned", "per-thread"])
def test_same_stream_reuse_asks_the_driver_one_thing(bench: Bench, kind: str, state_stream: bool) -> None:
    stream = bench.owned() if kind == "owned" else bench.fake.ambient(PER_THREAD)
    # A thread's own stream is another one in each context: the pool's is pushed.
    here = 0 if kind == "owned" else len(("exchange", "push", "pop", "exchange"))
    used, _ = bench.used_and_freed(1024, stream, state_stream=state_stream)
    bench.fake.clear()
    for _ in range(10):
        assert bench.allocate(1024, stream) == used
        bench.free(used, stream if state_stream else None)
    asked = 2 if state_stream else 1
    assert bench.fake.calls("cuStreamIsCapturing") == 10 * asked
    assert bench.fake.calls() == 10 * asked * (1 + here)


def test_reuse_on_the_legacy_stream_asks_nothing_of_it(bench: Bench) -> None:
    stream = bench.fake.ambient(LEGACY)
    used, _ = bench.used_and_freed(1024, stream)
    bench.fake.clear()
    assert bench.allocate(1024, stream) == used
    bench.free(used, stream)
    assert bench.fake.trace() == []


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("size", [64, 1024, 8 * MIB])
def test_host_reuse_makes_no_driver_call(bench: Bench, size: int, cpu: bool) -> None:
    ptr = bench.allocate(size, cpu=cpu)
    bench.free(ptr)
    bench.fake.clear()
    for _ in range(10):
        assert bench.allocate(size, cpu=cpu) == ptr
        bench.free(ptr)
    assert bench.fake.trace() == []


def test_the_hot_path_stays_so_while_other_memory_is_in_quarantine(bench: Bench) -> None:
    stream = bench.owned()
    array = bench.allocate(MIB, cpu=True)
    bench.expose(array, stream)
    bench.fake.enqueue(stream)
    bench.free(array)
    ptr = bench.allocate(64)
    used, _ = bench.used_and_freed(1024, stream)
    bench.free(ptr)
    bench.fake.clear()
    assert bench.allocate(64) == ptr
    assert bench.fake.trace() == []
    assert bench.allocate(1024, stream) == used
    assert set(bench.fake.trace()) <= AFFORDABLE


def test_cpu_frees_share_an_event_where_streams_are_held(bench: Bench) -> None:
    """A NumPy temporary costs a 2048th of an event for each stream, and no call but for that."""
    streams = [bench.owned(), bench.owned()]
    bench.fake.clear()
    for _ in range(2048 * 10):
        bench.free(bench.allocate(64, cpu=True))
    assert bench.fake.calls("cuEventRecord") == 10 * len(streams)
    assert bench.fake.calls("cuEventSynchronize") == bench.fake.calls("cuStreamSynchronize") == 0


def test_cpu_frees_with_streams_that_are_only_recorded_make_no_driver_call(fake: FakeCuda) -> None:
    bench = Bench(fake, ordering="recorded")
    bench.owned()
    ptr = bench.allocate(64, cpu=True)
    bench.free(ptr)
    fake.clear()
    for _ in range(100):
        assert bench.allocate(64, cpu=True) == ptr
        bench.free(ptr)
    assert fake.trace() == []
    assert bench.close()


def test_the_legacy_stream_is_never_asked_for_its_id(bench: Bench) -> None:
    """While a blocking stream is captured that would destroy the capture, in every mode."""
    blocking = bench.owned(blocking=True)
    bench.fake.begin_capture(blocking)
    for handle in (0, 1):
        ptr = bench.heap.allocate(1024, stream=handle)
        bench.blocks.record_stream(ptr, handle)
        bench.heap.deallocate(ptr, stream=handle)
    bench.heap.trim()
    assert bench.fake.end_capture(blocking)


def test_stealing_records_one_event_for_a_whole_bin(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=2 * MIB)
    first, second = bench.owned(), bench.owned()
    blocks = [bench.allocate(256 << 10, first) for _ in range(8)]
    fake.enqueue(first)
    for block in blocks:
        bench.free(block)
    assert fake.calls("cuEventRecord") == 0, "recorded lazily"
    for _ in blocks:
        bench.allocate(256 << 10, second)
    assert fake.calls("cuEventRecord") == 1
    assert fake.calls("cuStreamWaitEvent") == 1
    assert bench.close()


def test_a_wait_releases_the_gil(bench: Bench) -> None:
    """The fake reports a wait with the GIL held; here another Python thread runs during the wait as well."""
    stream = bench.owned()
    ptr = bench.allocate(MIB, stream)
    bench.fake.enqueue(stream, host=True)
    ran = threading.Event()
    thread = threading.Thread(target=ran.set)
    bench.fake.on_call("cuEventSynchronize", lambda: (thread.start(), thread.join(10))[1])
    bench.blocks.synchronize(ptr)
    assert ran.is_set()


def test_allocation_waits_without_the_gil(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    stream = bench.owned()
    ptr = bench.allocate(16 * MIB, stream)
    operation = fake.enqueue(stream, host=True)
    bench.free(ptr)
    assert bench.allocate(16 * MIB) == ptr
    assert fake.done(operation)
    assert bench.close()
