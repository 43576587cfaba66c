"""Debug mode on a device: each block is a piece of its own, and goes back once no work can touch it."""

import gc

import pytest
from fake_cuda import PER_THREAD, FakeCuda
from fake_cuda.pool import KIB, Bench
from helpers.waiting import eventually

pytestmark = pytest.mark.fake_driver


@pytest.mark.parametrize("stream_is_stated", [True, False])
def test_a_right_program_on_many_short_lived_streams_gives_everything_back(
    fake: FakeCuda, stream_is_stated: bool
) -> None:
    bench = Bench(fake, pool="debug")
    kept: list[int] = []
    for _ in range(20):
        stream = bench.owned()
        stated = stream if stream_is_stated else None
        x = bench.allocate(20 * KIB, stream)
        fake.enqueue(stream)
        y = bench.allocate(20 * KIB, stream)
        fake.enqueue(stream)
        bench.free(x, stated)
        host = bench.allocate(12 * KIB, cpu=True)
        bench.order(host, stream)
        fake.enqueue(stream)
        z = bench.allocate(12 * KIB, stream)
        for ptr in (y, z):
            bench.blocks.synchronize(ptr)
        for ptr in kept:
            bench.free(ptr)
        kept = [y, host, z]
        bench.owners.clear()  # the program has no reference to its stream any more
        gc.collect()
    for ptr in kept:
        bench.free(ptr)
    fake.finish_all()
    assert eventually(lambda: bench.reserved_bytes == 0), bench.heap.numbers
    assert bench.close()


@pytest.mark.parametrize("handle", [PER_THREAD, None])
def test_a_block_freed_in_a_capture_waits_for_no_longer_than_that(fake: FakeCuda, handle: int | None) -> None:
    """A stream is known from before its capture, also where no block is ever taken again in front."""
    bench = Bench(fake, pool="debug")
    stream = bench.owned() if handle is None else fake.ambient(handle)
    ptr = bench.allocate(20 * KIB, stream)
    fake.begin_capture(stream)
    bench.free(ptr, stream)
    bench.heap.trim()
    assert bench.quarantined_bytes > 0
    assert fake.end_capture(stream)
    bench.heap.trim()
    assert bench.quarantined_bytes == 0
    assert bench.close()
