"""NumPy's functions on a thread that runs a CUDA host function: no CUDA call but one, and no wait."""

import ctypes
from collections.abc import Iterator

import pytest
from fake_cuda import FakeCuda
from fake_cuda.pool import KIB, MIB, Bench

from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge._native import pool as native_pool

pytestmark = pytest.mark.fake_driver


class Inside:
    """A pool under NumPy's handler, whose functions are called as from a host function."""

    def __init__(self, fake: FakeCuda, **settings: object) -> None:
        self.fake, self.bench = fake, Bench(fake, limit_bytes=64 * MIB, **settings)
        self.stream = self.bench.owned()
        self.handler = numpy_handler.NumpyHandler()
        self.handler.use(self.bench.heap)

    def ours(self, ptr: int) -> bool:
        """Return True if the pool has the block."""
        return native_pool.pool_containing(ptr) is self.bench.heap

    def shown(self, size_bytes: int) -> tuple[int, int]:
        """Return a block that unfinished work on the stream touches, and that work."""
        ptr = self.handler.malloc(size_bytes)
        self.bench.expose(ptr, self.stream)
        return ptr, self.fake.enqueue(self.stream)


@pytest.fixture
def inside(fake: FakeCuda) -> Iterator[Inside]:
    made = Inside(fake)
    fake.clear()
    yield made
    assert fake.violations() == []
    made.handler.use(None)
    assert made.bench.close()


def test_what_is_ready_serves_and_else_plain_memory(inside: Inside) -> None:
    before = inside.handler.malloc(100)
    with inside.fake.host_function():
        ready = inside.handler.malloc(100)
        plain = inside.handler.calloc(1, 8 * MIB)  # larger than what is left of the first piece's slab
    assert inside.ours(ready)
    assert set(inside.fake.trace()) <= {"cuCtxGetCurrent"}
    assert plain
    for ptr in (before, ready, plain):
        inside.handler.free(ptr)


def test_a_full_pool_gives_plain_memory_and_waits_for_nothing(inside: Inside) -> None:
    """What it would wait for may stand behind the host function itself."""
    ptr, operation = inside.shown(48 * MIB)
    inside.handler.free(ptr)
    with inside.fake.host_function():
        plain = inside.handler.malloc(48 * MIB)
    assert plain
    assert not inside.ours(plain)
    assert not inside.fake.done(operation)
    inside.handler.free(plain)


def test_a_shown_block_freed_there_waits_for_its_stream(inside: Inside) -> None:
    ptr, operation = inside.shown(MIB)
    with inside.fake.host_function():
        inside.handler.free(ptr)
    assert inside.bench.quarantined_bytes >= MIB
    inside.fake.hang()
    others = [inside.handler.malloc(MIB) for _ in range(8)]
    assert ptr not in others
    assert not inside.fake.done(operation)
    inside.fake.finish(operation)
    inside.bench.heap.trim()
    assert inside.bench.quarantined_bytes == 0
    for other in others:
        inside.handler.free(other)


def test_a_full_batch_of_frees_stays_for_the_next_thread(inside: Inside) -> None:
    blocks = [inside.handler.malloc(64 * KIB) for _ in range(40)]  # more than the batch of 1 MiB
    inside.fake.clear()
    with inside.fake.host_function():
        for ptr in blocks:
            inside.handler.free(ptr)
    assert set(inside.fake.trace()) <= {"cuCtxGetCurrent"}
    last = inside.handler.malloc(64 * KIB)
    inside.handler.free(last)
    inside.bench.heap.trim()
    inside.fake.finish_all()
    inside.bench.heap.trim()
    assert inside.bench.quarantined_bytes == 0


def test_realloc_there_moves_to_plain_memory_and_keeps_the_contents(inside: Inside) -> None:
    ptr = inside.handler.malloc(60 * KIB)
    ctypes.memset(ptr, 7, 60 * KIB)
    with inside.fake.host_function():
        moved = inside.handler.realloc(ptr, 60 * MIB)
    assert moved
    assert not inside.ours(moved)
    assert ctypes.string_at(moved, 60 * KIB) == b"\x07" * (60 * KIB)
    inside.handler.free(moved)
    assert inside.bench.heap.live_count == 0


def test_realloc_there_of_a_block_that_work_touches_is_refused(inside: Inside) -> None:
    ptr, operation = inside.shown(MIB)
    with inside.fake.host_function():
        assert inside.handler.realloc(ptr, 60 * MIB) == 0
    assert not inside.fake.done(operation)
    inside.handler.free(ptr)


def test_without_numpys_fallback_the_error_says_where_it_is(inside: Inside) -> None:
    with inside.fake.host_function(), pytest.raises(MemoryError, match="inside a CUDA host function"):
        inside.bench.heap.allocate(48 * MIB, cpu=True)
