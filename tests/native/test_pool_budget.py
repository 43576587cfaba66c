"""How much a pool of a device keeps: allocations take what has finished, and the rest goes back when nothing runs."""

import itertools
import random

import pytest
from fake_cuda import FakeCuda, Stream
from fake_cuda.pool import MIB, Bench
from helpers.waiting import eventually

pytestmark = pytest.mark.fake_driver

SPARE = 64 * MIB


def budgeted(fake: FakeCuda, **settings: object) -> Bench:
    return Bench(fake, retain="budget", **settings)


def given_back(bench: Bench) -> int:
    return int(bench.native_process.budget_counters()[0])


def grow(bench: Bench, stream: Stream, sizes: list[int], *, done_after: int) -> int:
    """Copy an array to a larger one again and again; each copy ends so many later. Return the peak of live bytes."""
    peak, operations = 0, []
    array = bench.allocate(sizes[0], stream)
    for before, size in itertools.pairwise(sizes):
        larger = bench.allocate(size, stream)
        operations.append(bench.fake.enqueue(stream))
        bench.free(array, stream)
        peak = max(peak, before + size)
        array = larger
        if len(operations) > done_after:
            bench.fake.finish(operations.pop(0))
        if size % 5 == 0:
            # The device has nothing to do for a moment, in which the bridge's thread gives back.
            bench.fake.finish_all()
            assert eventually(lambda peak=peak: bench.reserved_bytes <= 2 * peak + 128 * MIB), "it stays above"
    bench.free(array, stream)
    return peak


@pytest.mark.parametrize("done_after", [0, 2])
def test_an_array_that_grows_on_a_stream_stays_within_the_bound(fake: FakeCuda, done_after: int) -> None:
    bench = budgeted(fake, recent_ms=10_000_000)
    stream = bench.owned()
    sizes = [size * MIB for size in range(2, 200, 3)]
    grow(bench, stream, sizes, done_after=done_after)
    assert bench.close()


def test_an_allocation_gives_nothing_back_and_waits_for_nothing(fake: FakeCuda) -> None:
    bench = budgeted(fake, spare_bytes=0, recent_ms=10_000_000)
    stream, before = bench.owned(), given_back(bench)
    used = bench.allocate(MIB, stream)
    operation = fake.enqueue(stream)
    for size in range(2, 40, 3):
        bench.free(bench.allocate(size * MIB, stream), stream)
    assert not fake.done(operation)
    assert given_back(bench) == before
    bench.free(used, stream)
    assert bench.close()


def test_a_block_of_an_unfinished_stream_becomes_no_other_block(fake: FakeCuda) -> None:
    """At the budget, large blocks leave their lane: not before its work has ended."""
    bench = budgeted(fake, spare_bytes=0, recent_ms=10_000_000)
    first, second = bench.owned(), bench.owned()
    blocks = [bench.allocate(20 * MIB, first) for _ in range(4)]
    operation = fake.enqueue(first)
    for block in blocks:
        bench.free(block, first)
    more = [bench.allocate(36 * MIB, second) for _ in range(3)]
    assert not fake.done(operation)
    assert not any(block <= each < block + 20 * MIB for block in blocks for each in more)
    fake.finish(operation)
    reserved = bench.reserved_bytes
    bench.allocate(20 * MIB, second)
    assert bench.reserved_bytes == reserved, "what has finished is taken before the pool grows"
    assert bench.close()


def test_what_is_above_goes_back_once_nothing_runs(fake: FakeCuda) -> None:
    bench = budgeted(fake, recent_ms=200)
    stream = bench.owned()
    blocks = [bench.allocate(50 * MIB, stream) for _ in range(8)]
    small = bench.allocate(MIB, stream)
    operation = fake.enqueue(stream)
    for block in blocks:
        bench.free(block, stream)
    reserved = bench.reserved_bytes
    assert reserved >= 400 * MIB
    assert not eventually(lambda: bench.reserved_bytes < reserved, seconds=1.5), "freeing would wait for the device"
    fake.finish(operation)
    assert eventually(lambda: bench.reserved_bytes <= 2 * MIB + 128 * MIB, seconds=20)
    bench.free(small, stream)
    assert bench.close()


def test_nothing_goes_back_while_a_stream_is_captured(fake: FakeCuda) -> None:
    bench = budgeted(fake, recent_ms=200)
    stream, captured = bench.owned(), bench.owned()
    blocks = [bench.allocate(50 * MIB, stream) for _ in range(8)]
    fake.begin_capture(captured)
    for block in blocks:
        bench.free(block, stream)
    reserved = bench.reserved_bytes
    assert not eventually(lambda: bench.reserved_bytes < reserved, seconds=1.5)
    assert fake.end_capture(captured)
    assert eventually(lambda: bench.reserved_bytes <= 128 * MIB, seconds=20)
    assert bench.close()


@pytest.mark.parametrize("settings", [{"retain": "all"}, {"retain": "budget", "release_threshold_bytes": 1 << 40}])
def test_all_is_kept_where_that_was_asked_for(fake: FakeCuda, settings: dict[str, object]) -> None:
    bench = Bench(fake, recent_ms=100, **settings)
    stream = bench.owned()
    for size in (100, 200, 300):
        bench.free(bench.allocate(size * MIB, stream), stream)
    assert bench.reserved_bytes >= 600 * MIB
    assert not eventually(lambda: bench.reserved_bytes < 600 * MIB, seconds=0.5)
    assert bench.close()


def test_the_budget_is_never_below_what_was_asked_for_at_first(fake: FakeCuda) -> None:
    bench = budgeted(fake, recent_ms=100, least_budget_bytes=500 * MIB)
    stream = bench.owned()
    bench.free(bench.allocate(300 * MIB, stream), stream)
    reserved = bench.reserved_bytes
    assert not eventually(lambda: bench.reserved_bytes < reserved, seconds=0.5)
    assert bench.close()


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_stay_within_the_bound_but_for_pinned_pieces_and_unfinished_work(
    fake: FakeCuda, seed: int
) -> None:
    dice = random.Random(seed)
    bench = budgeted(fake, recent_ms=10_000_000)
    streams = [bench.owned() for _ in range(2)]
    live: list[tuple[int, int, Stream]] = []
    peak = 0
    for _ in range(6):
        most, kept = dice.randrange(2, 150), dice.randrange(1, 6)
        for step in range(30):
            size = max(1, int(most * MIB * (step / 30 if dice.random() < 0.5 else dice.random())))
            stream = dice.choice(streams)
            live.append((bench.allocate(size, stream), size, stream))
            fake.enqueue(stream)
            peak = max(peak, sum(size for _, size, _ in live))
            while len(live) > kept:
                ptr, _, used_on = live.pop(dice.randrange(len(live)))
                bench.free(ptr, used_on)
            if dice.random() < 0.8:
                fake.finish_all()
        fake.finish_all()

        def within(peak: int = peak) -> bool:
            reserved, _, _, _, _, _, pinned = bench.heap.numbers
            return reserved - pinned <= 2 * peak + 128 * MIB

        assert eventually(within)
    assert bench.close()
