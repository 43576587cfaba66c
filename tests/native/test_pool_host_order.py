"""Invariant 2: CPU code is never handed memory that device work enqueued earlier may still touch."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from fake_cuda import LEGACY, FakeCuda
from fake_cuda.pool import KIB, MIB, Bench

from rmm_managed_bridge._native import numpy_handler

pytestmark = pytest.mark.fake_driver

SIZES = [1024, 16 * MIB]  # from a slab, and a span of its own


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("owned", [True, False])
def test_host_never_gets_a_block_that_its_stream_still_uses(bench: Bench, size: int, owned: bool) -> None:
    stream = bench.owned() if owned else bench.borrowed()
    used, operation = bench.used_and_freed(size, stream)
    for _ in range(20):
        assert bench.allocate(size) != used
    assert not bench.fake.done(operation)
    assert bench.fake.calls("cuEventSynchronize") == 0, "other memory comes before waiting"


@pytest.mark.behaviour("G3")
@pytest.mark.parametrize("size", SIZES)
def test_host_never_gets_a_cpu_block_that_a_view_still_uses(bench: Bench, size: int) -> None:
    """G3: a NumPy array shown to a device, with a slow writer behind the view, then both dropped."""
    stream = bench.owned()
    array = bench.allocate(size, cpu=True)
    bench.order(array, stream)
    writer = bench.fake.enqueue(stream)
    bench.free(array)
    others = [bench.allocate(size, cpu=True) for _ in range(20)]
    assert array not in others
    assert bench.quarantined_bytes >= size
    bench.fake.finish(writer)
    again = [bench.allocate(size, cpu=True) for _ in range(80 if size > MIB else 2100)]  # more than a slab
    assert array in again, "finished memory is used again"
    assert bench.quarantined_bytes == 0


def test_host_waits_for_every_stream_that_was_recorded(bench: Bench) -> None:
    first, second = bench.owned(), bench.owned()
    array = bench.allocate(MIB, cpu=True)
    for stream in (first, second):
        bench.expose(array, stream)
    operations = [bench.fake.enqueue(first), bench.fake.enqueue(second)]
    bench.free(array)
    for operation in operations:
        assert array not in [bench.allocate(MIB, cpu=True) for _ in range(3)]
        bench.fake.finish(operation)
    assert array in [bench.allocate(MIB, cpu=True) for _ in range(16)]


def test_host_waits_for_held_streams_that_nobody_recorded(bench: Bench) -> None:
    """The cautious default for blocks that were shown to a device at all."""
    told, forgotten = bench.owned(), bench.owned()
    array = bench.allocate(MIB, cpu=True)
    bench.expose(array, told)
    operation = bench.fake.enqueue(forgotten)
    bench.free(array)
    assert array not in [bench.allocate(MIB, cpu=True) for _ in range(8)]
    bench.fake.finish(operation)
    assert array in [bench.allocate(MIB, cpu=True) for _ in range(16)]


def test_a_cpu_block_freed_on_a_stream_was_used_there(bench: Bench) -> None:
    for stream in (bench.owned(), bench.borrowed(), bench.fake.ambient(LEGACY)):
        array = bench.allocate(MIB, cpu=True)
        operation = bench.fake.enqueue(stream)
        bench.free(array, stream)
        assert array not in [bench.allocate(MIB, cpu=True) for _ in range(8)]
        bench.fake.finish(operation)


def test_a_cpu_block_on_a_stream_lies_apart_from_gpu_blocks(bench: Bench) -> None:
    """Invariant 12, and the order of such a block: nobody frees it on the stream."""
    stream = bench.owned()
    gpu = [bench.allocate(2048, stream) for _ in range(4)]
    for ptr in gpu:
        bench.free(ptr, stream)
    cpu = bench.allocate(256, stream, cpu=True)
    pages = {ptr >> 16 for ptr in gpu}
    assert cpu >> 16 not in pages
    operation = bench.fake.enqueue(stream)
    bench.free(cpu)
    assert cpu not in [bench.allocate(256, cpu=True) for _ in range(8)]
    bench.fake.finish(operation)


@pytest.mark.parametrize("state_stream", [True, False])
def test_host_waits_when_there_is_no_other_memory(fake: FakeCuda, state_stream: bool) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    used, operation = bench.used_and_freed(16 * MIB, bench.owned(), state_stream=state_stream)
    assert bench.allocate(16 * MIB) == used
    assert fake.done(operation)
    assert bench.close()


def test_host_waits_for_several_streams_when_there_is_no_other_memory(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    streams = [bench.owned() for _ in range(3)]
    array = bench.allocate(16 * MIB, cpu=True)
    for stream in streams:
        bench.expose(array, stream)
    operations = [fake.enqueue(stream) for stream in streams]
    bench.free(array)
    assert bench.allocate(16 * MIB, cpu=True) == array
    assert all(fake.done(operation) for operation in operations)
    assert bench.close()


def test_host_waits_for_the_rest_when_some_streams_have_finished(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    streams = [bench.owned() for _ in range(2)]
    array = bench.allocate(16 * MIB, cpu=True)
    for stream in streams:
        bench.expose(array, stream)
    first, second = [fake.enqueue(stream) for stream in streams]
    bench.free(array)
    fake.finish(first)
    assert bench.allocate(16 * MIB, cpu=True) == array
    assert fake.done(second)
    assert bench.close()


@pytest.mark.parametrize("unheld", [False, True])
def test_synchronize_waits_for_all_work_on_the_block(bench: Bench, unheld: bool) -> None:
    own, other = bench.owned(), bench.owned()
    ptr = bench.allocate(MIB, own)
    bench.order(ptr, other)
    operations = [bench.fake.enqueue(own), bench.fake.enqueue(other), bench.fake.enqueue(other, host=True)]
    if unheld:  # work of a stream that nobody recorded
        operations.append(bench.fake.enqueue(bench.owned()))
    bench.blocks.synchronize(ptr)
    assert all(bench.fake.done(operation) for operation in operations)


def test_closing_waits_for_blocks_that_streams_still_use(bench: Bench) -> None:
    stream = bench.owned()
    _, first = bench.used_and_freed(MIB, stream)
    array = bench.allocate(MIB, cpu=True)
    bench.expose(array, stream)
    second = bench.fake.enqueue(stream)
    bench.free(array)
    assert bench.heap.retire()
    assert bench.fake.done(first) and bench.fake.done(second)
    assert bench.reserved_bytes == 0


@pytest.mark.parametrize("owned", [True, False])
def test_closing_waits_for_blocks_in_lanes(bench: Bench, owned: bool) -> None:
    _, operation = bench.used_and_freed(16 * MIB, bench.owned() if owned else bench.borrowed())
    assert bench.heap.retire()
    assert bench.fake.done(operation)
    assert bench.reserved_bytes == 0


@pytest.mark.parametrize("owned", [True, False])
def test_trim_gives_nothing_back_that_a_stream_still_uses(bench: Bench, owned: bool) -> None:
    stream = bench.owned() if owned else bench.borrowed()
    _, operation = bench.used_and_freed(16 * MIB, stream)
    assert bench.heap.trim() == 0
    bench.fake.finish(operation)
    assert bench.heap.trim() == bench.reserved_bytes + 64 * MIB
    assert bench.reserved_bytes == 0


def test_a_block_freed_while_its_lane_is_closed_is_waited_for(bench: Bench) -> None:
    """Another thread frees between the lane's event and the move of its blocks; the event does not cover that block."""
    stream = bench.owned()
    first, early = bench.used_and_freed(MIB, stream)
    second = bench.allocate(MIB, stream)
    assert second == first
    third = bench.allocate(MIB, stream)
    bench.free(third, stream)
    late: list[int] = []

    def use_and_free() -> None:
        late.append(bench.fake.enqueue(stream))
        bench.free(second, stream)

    bench.fake.on_call("cuEventRecord", use_and_free)
    bench.heap.trim()
    assert late, "trim closes the lane"
    bench.fake.finish(early)
    assert second not in [bench.allocate(MIB) for _ in range(16)]


@pytest.fixture
def handler(bench: Bench) -> Iterator[Any]:
    """NumPy's four functions over the bench's heap."""
    handler = numpy_handler.NumpyHandler()
    handler.use(bench.heap)
    yield handler
    handler.use(None)


@pytest.mark.behaviour("N4")
@pytest.mark.parametrize("size", [KIB, 16 * MIB])
@pytest.mark.parametrize("view", [True, False])
def test_a_resize_that_moves_copies_what_unfinished_work_writes(
    bench: Bench, handler: Any, size: int, view: bool
) -> None:
    """The device writes when its work is waited for: what was copied before that would be the old contents."""
    stream, bystander = bench.owned(), bench.owned()
    ptr = handler.malloc(size)
    ctypes.memset(ptr, 1, size)
    (bench.order if view else bench.expose)(ptr, stream)
    writer, other = bench.fake.enqueue(stream), bench.fake.enqueue(bystander)
    ready: list[bool] = []

    def write() -> None:
        ready.append(bench.fake.done(writer))
        ctypes.memset(ptr, 2, size)

    bench.fake.on_call("cuEventSynchronize", write)
    moved = handler.realloc(ptr, 2 * size)
    assert ready == [True], "the copy waits for the work"
    assert moved not in (0, ptr)
    assert ctypes.string_at(moved, size) == bytes([2]) * size
    assert bench.fake.done(other), "the cautious default: nobody said that it does not touch the block"
    handler.free(moved)


@pytest.mark.behaviour("N4")
def test_a_resize_waits_with_the_gil_released(bench: Bench, handler: Any) -> None:
    stream = bench.owned()
    ptr = handler.malloc(KIB)
    bench.order(ptr, stream)
    operation = bench.fake.enqueue(stream, host=True)  # a Python function: with the GIL held it would be a violation
    moved = handler.realloc(ptr, MIB)
    assert bench.fake.done(operation)
    handler.free(moved)


@pytest.mark.behaviour("N4")
def test_a_resize_of_what_no_device_was_shown_waits_for_nothing(bench: Bench, handler: Any) -> None:
    ptr = handler.malloc(KIB)
    operation = bench.fake.enqueue(bench.owned())
    moved = handler.realloc(ptr, MIB)
    assert bench.fake.calls("cuEventSynchronize") == 0
    assert not bench.fake.done(operation)
    handler.free(moved)


@pytest.mark.behaviour("N4")
def test_a_resize_in_place_copies_nothing_and_waits_for_nothing(bench: Bench, handler: Any) -> None:
    stream = bench.owned()
    ptr = handler.malloc(1000)
    bench.order(ptr, stream)
    operation = bench.fake.enqueue(stream)
    assert handler.realloc(ptr, 1024) == ptr
    assert not bench.fake.done(operation)
    handler.free(ptr)


@pytest.mark.behaviour("N5")
def test_a_resize_that_cannot_wait_leaves_the_block_whole(bench: Bench, handler: Any) -> None:
    stream = bench.owned()
    ptr = handler.malloc(KIB)
    ctypes.memset(ptr, 1, KIB)
    bench.order(ptr, stream)
    operation = bench.fake.enqueue(stream)
    before = bench.heap.live_count, bench.heap.live_bytes
    bench.fake.fail("cuEventSynchronize")
    assert handler.realloc(ptr, MIB) == 0
    assert (bench.heap.live_count, bench.heap.live_bytes) == before
    assert ctypes.string_at(ptr, KIB) == bytes([1]) * KIB
    bench.fake.finish(operation)
    moved = handler.realloc(ptr, MIB)
    assert ctypes.string_at(moved, KIB) == bytes([1]) * KIB
    handler.free(moved)


@pytest.mark.parametrize("ordering", ["cautious", "recorded"])
def test_what_a_resize_left_is_quarantined_like_any_freed_block(fake: FakeCuda, ordering: str) -> None:
    """Work that was enqueued after the wait may still touch the old memory."""
    bench, handler = Bench(fake, ordering=ordering), numpy_handler.NumpyHandler()
    handler.use(bench.heap)
    stream = bench.owned()
    ptr = handler.malloc(MIB)
    bench.order(ptr, stream)
    late: list[int] = []
    fake.enqueue(stream)
    fake.on_call("cuEventSynchronize", lambda: late.append(fake.enqueue(stream)))
    moved = handler.realloc(ptr, 4 * MIB)
    assert late and not fake.done(late[0])
    assert ptr not in [bench.allocate(MIB, cpu=True) for _ in range(8)]
    fake.finish(late[0])
    assert ptr in [bench.allocate(MIB, cpu=True) for _ in range(32)]
    handler.free(moved)
    handler.use(None)
    assert bench.close()
