"""A capture holds back what was alive when it began and what it used, and nobody else."""

import time

import pytest
from fake_cuda import RELAXED, FakeCuda
from fake_cuda.pool import KIB, MIB, Bench

pytestmark = pytest.mark.fake_driver
TICK_SECONDS = 0.06
"""More than the margin and the step of the coarse clock, by which a block's age is told."""


@pytest.fixture
def small(fake: FakeCuda) -> Bench:
    return Bench(fake, limit_bytes=9 * MIB, wait_timeout_ms=1000)


def begin(bench: Bench) -> tuple[object, object]:
    """Return a stream that is captured, with work from before on it, and another one; the pool has seen the capture."""
    captured, other = bench.owned(), bench.owned()
    bench.fake.enqueue(captured)
    bench.fake.begin_capture(captured, RELAXED)
    first = bench.allocate(KIB, cpu=True)
    bench.expose(first, other)
    bench.free(first)
    time.sleep(TICK_SECONDS)
    return captured, other


def test_arrays_that_are_made_during_a_capture_come_back(small: Bench) -> None:
    captured, _ = begin(small)
    for _ in range(200):
        small.free(small.allocate(MIB, cpu=True))
    assert small.quarantined_bytes <= 2 * MIB
    small.fake.end_capture(captured)
    assert small.close()


def test_arrays_that_are_shown_to_another_stream_come_back_too(small: Bench) -> None:
    captured, other = begin(small)
    for _ in range(100):
        ptr = small.allocate(MIB, cpu=True)
        small.order(ptr, other)
        small.fake.finish(small.fake.enqueue(other))
        small.free(ptr)
    small.fake.end_capture(captured)
    assert small.close()


def test_what_was_alive_when_it_began_waits_for_it(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=9 * MIB, wait_timeout_ms=300)
    old = bench.allocate(4 * MIB, cpu=True)
    captured, _ = begin(bench)
    bench.free(old)
    kept = bench.allocate(4 * MIB, cpu=True)
    assert kept != old, "work from before the capture may be using it"
    with pytest.raises(MemoryError):
        bench.allocate(4 * MIB, cpu=True)
    fake.end_capture(captured)
    fake.finish_all()
    assert bench.allocate(4 * MIB, cpu=True) == old
    assert bench.close()


def test_what_the_capture_was_told_to_use_waits_for_it(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=9 * MIB, wait_timeout_ms=300)
    captured, _ = begin(bench)
    used = bench.allocate(4 * MIB, cpu=True)
    bench.expose(used, captured)
    bench.free(used)
    assert bench.allocate(4 * MIB, cpu=True) != used
    fake.end_capture(captured)
    assert bench.close()


def test_a_second_capture_begins_anew(fake: FakeCuda) -> None:
    """Between the two the stream may have been given work on what was made during the first."""
    bench = Bench(fake, limit_bytes=9 * MIB, wait_timeout_ms=300)
    captured, _ = begin(bench)
    between = bench.allocate(4 * MIB, cpu=True)
    fake.end_capture(captured)
    operation = fake.enqueue(captured)
    fake.begin_capture(captured, RELAXED)
    bench.free(between)
    assert bench.allocate(4 * MIB, cpu=True) != between
    with pytest.raises(MemoryError):
        bench.allocate(4 * MIB, cpu=True)
    assert not fake.done(operation)
    fake.end_capture(captured)
    assert bench.close()
