"""CPU blocks that a copy nobody tells of may still read: they wait for the streams that the bridge holds."""

import pytest
from fake_cuda import LEGACY, FakeCuda
from fake_cuda.pool import KIB, MIB, Bench

pytestmark = pytest.mark.fake_driver


@pytest.mark.parametrize("size", [64, 4 * KIB, MIB, 16 * MIB])
def test_the_source_of_an_invisible_copy_is_not_used_again(bench: Bench, size: int) -> None:
    stream = bench.owned()
    source = bench.allocate(size, cpu=True)
    copy = bench.fake.enqueue(stream)
    bench.free(source)
    taken = [bench.allocate(size, cpu=True) for _ in range(200 if size < MIB else 8)]
    assert source not in taken
    for ptr in taken:
        bench.free(ptr)
    bench.fake.finish(copy)
    seen = set()
    for _ in range(10_000):  # with the next batches, a look at what has ended
        seen.add(bench.allocate(size, cpu=True))
        if len(bench.live) > 40:
            bench.free(next(iter(bench.live)))
    assert source in seen, "once the copy has ended, it is"


def test_every_held_stream_counts(bench: Bench) -> None:
    streams = [bench.owned() for _ in range(4)]
    copies = [bench.fake.enqueue(stream) for stream in streams]
    sources = [bench.allocate(MIB, cpu=True) for _ in range(4)]
    for source in sources:
        bench.free(source)
    for copy in copies:
        assert not set(sources) & {bench.allocate(MIB, cpu=True) for _ in range(4)}
        bench.fake.finish(copy)
    assert set(sources) <= {bench.allocate(MIB, cpu=True) for _ in range(64)}


def test_without_a_stream_nothing_waits(bench: Bench) -> None:
    source = bench.allocate(MIB, cpu=True)
    bench.free(source)
    assert bench.allocate(MIB, cpu=True) == source


def test_a_borrowed_stream_cannot_be_waited_for(bench: Bench) -> None:
    """What the guide says remains: a stream that the bridge does not hold."""
    ptr = bench.allocate(MIB, bench.borrowed())
    source = bench.allocate(MIB, cpu=True)
    bench.free(source)
    assert bench.allocate(MIB, cpu=True) == source
    bench.live.pop(ptr)
    bench.heap.deallocate(ptr)


def test_the_legacy_stream_counts_while_blocks_are_on_it(bench: Bench) -> None:
    """An event there makes blocking streams wait for each other, so only its users pay for it."""
    bench.owned()
    legacy = bench.fake.ambient(LEGACY)
    block = bench.allocate(MIB, legacy)
    copy = bench.fake.enqueue(legacy)
    source = bench.allocate(MIB, cpu=True)
    bench.free(source)
    assert source not in [bench.allocate(MIB, cpu=True) for _ in range(4)]
    bench.fake.finish(copy)
    bench.free(block, legacy)
    bench.heap.trim()
    bench.fake.finish_all()
    bench.heap.trim()
    bench.fake.enqueue(legacy)
    ptrs = [bench.allocate(MIB, cpu=True) for _ in range(2)]
    bench.fake.clear()
    for ptr in ptrs:
        bench.free(ptr)
    assert bench.fake.calls("cuEventRecord") == len(ptrs), "one for the other stream, none for the legacy one"


def test_a_capture_keeps_them_and_stays_valid(bench: Bench) -> None:
    stream = bench.owned()
    bench.fake.begin_capture(stream)
    source = bench.allocate(MIB, cpu=True)
    bench.free(source)
    assert source not in [bench.allocate(MIB, cpu=True) for _ in range(4)]
    assert bench.fake.end_capture(stream)
    assert source in [bench.allocate(MIB, cpu=True) for _ in range(8)]


def test_batches_grow_while_nothing_ends(bench: Bench) -> None:
    """Behind a long kernel, thousands of frees must not become thousands of batches to look through."""
    stream = bench.owned()
    bench.fake.enqueue(stream)
    bench.fake.clear()
    for _ in range(20_000):
        bench.free(bench.allocate(64, cpu=True))
    assert bench.fake.calls("cuEventRecord") < 20
    assert bench.quarantined_bytes >= 20_000 * 64


def test_trim_gives_them_back_once_the_work_has_ended(bench: Bench) -> None:
    stream = bench.owned()
    copy = bench.fake.enqueue(stream)
    bench.free(bench.allocate(100, cpu=True))
    bench.heap.trim()
    assert bench.reserved_bytes != 0
    bench.fake.finish(copy)
    bench.heap.trim()
    assert bench.reserved_bytes == 0


def test_a_pool_with_nothing_else_left_waits_for_them(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    copy = fake.enqueue(bench.owned())
    source = bench.allocate(16 * MIB, cpu=True)
    bench.free(source)
    assert bench.allocate(16 * MIB, cpu=True) == source
    assert fake.done(copy)
    assert bench.close()


@pytest.mark.parametrize("other", [False, True])
def test_the_work_of_a_stream_that_was_let_go_counts(bench: Bench, other: bool) -> None:
    stream = bench.owned()
    if other:
        bench.owned()
    source = bench.allocate(MIB, cpu=True)
    copy = bench.fake.enqueue(stream)
    bench.owners.pop(stream)
    assert bench.heap.drop_unused_streams() == 1
    bench.free(source)
    assert source not in [bench.allocate(MIB, cpu=True) for _ in range(4)]
    bench.fake.finish(copy)
    assert source in [bench.allocate(MIB, cpu=True) for _ in range(64)]
    bench.fake.clear()
    ptrs = [bench.allocate(MIB, cpu=True) for _ in range(4)]
    for ptr in ptrs:
        bench.free(ptr)
    bench.fake.clear()
    bench.free(bench.allocate(64, cpu=True))
    assert bench.fake.trace() == [], "and not for ever"
