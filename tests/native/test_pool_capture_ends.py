"""A capture that another thread ends while we record an event: one that went into the capture stands behind nothing."""

import pytest
from fake_cuda import RELAXED, FakeCuda, Stream
from fake_cuda.pool import MIB, Bench

from rmm_managed_bridge.errors import BridgeError

pytestmark = pytest.mark.fake_driver


def used_freed_and_captured(bench: Bench, size: int) -> tuple[int, int, Stream]:
    """Return a free block, its unfinished work, and its stream, in a capture that ends when an event is recorded."""
    stream = bench.owned()
    ptr, operation = bench.used_and_freed(size, stream)
    bench.fake.begin_capture(stream, RELAXED)
    bench.fake.on_call("cuEventRecord", lambda: bench.fake.end_capture(stream))
    return ptr, operation, stream


def test_a_block_that_waits_for_such_an_event_comes_back(fake: FakeCuda) -> None:
    bench = Bench(fake)
    _, _, stream = used_freed_and_captured(bench, 16 * MIB)
    bench.heap.trim()
    fake.end_capture(stream)
    fake.finish_all()
    bench.heap.trim()
    assert bench.quarantined_bytes == 0


def test_a_thief_does_not_rely_on_such_an_event(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    ptr, operation, _ = used_freed_and_captured(bench, 16 * MIB)
    thief = bench.owned()
    try:
        taken = bench.allocate(16 * MIB, thief)
    except MemoryError:
        taken = 0
    assert taken != ptr or fake.ordered(operation, thief)


def test_a_wait_for_such_an_event_is_a_wait_or_is_refused_for_the_capture(fake: FakeCuda) -> None:
    """Not blamed on kernels."""
    bench = Bench(fake)
    stream = bench.owned()
    ptr = bench.allocate(MIB, stream)
    operation = fake.enqueue(stream)
    fake.begin_capture(stream, RELAXED)
    fake.on_call("cuEventRecord", lambda: fake.end_capture(stream))
    try:
        bench.blocks.synchronize(ptr)
    except BridgeError as error:
        assert "captured" in str(error)
    else:
        assert fake.done(operation)
    bench.close()
