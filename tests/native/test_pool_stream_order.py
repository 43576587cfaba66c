"""Invariant 3: a stream is never handed memory that another stream's earlier work may still touch, unless it waits."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
from fake_cuda import LEGACY, PER_THREAD, FakeCuda, Stream
from fake_cuda.pool import MIB, Bench

from rmm_managed_bridge.errors import BridgeError

pytestmark = pytest.mark.fake_driver

KINDS: dict[str, Callable[[Bench], Stream]] = {
    "owned": lambda bench: bench.owned(),
    "owned blocking": lambda bench: bench.owned(blocking=True),
    "borrowed": lambda bench: bench.borrowed(),
    "borrowed blocking": lambda bench: bench.borrowed(blocking=True),
    "legacy": lambda bench: bench.fake.ambient(LEGACY),
    "per-thread": lambda bench: bench.fake.ambient(PER_THREAD),
}


def run_in_thread(action: Callable[[], None]) -> None:
    """Run `action` to its end on a new thread that has device 0 current, and raise what it raises."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("taker", KINDS)
@pytest.mark.parametrize("giver", KINDS)
def test_another_stream_waits_for_the_block(fake: FakeCuda, giver: str, taker: str) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    first, second = KINDS[giver](bench), KINDS[taker](bench)
    used, operation = bench.used_and_freed(16 * MIB, first)
    assert bench.allocate(16 * MIB, second) == used
    assert fake.ordered(operation, second)
    assert not fake.done(operation), "a stream waits on the device, not on the CPU"
    assert bench.close()


@pytest.mark.parametrize("last", ["borrowed", "owned", "legacy", "host"])
@pytest.mark.parametrize("taker", ["borrowed", "owned", "legacy"])
@pytest.mark.parametrize("giver", ["borrowed", "owned", "legacy", "per-thread"])
@pytest.mark.parametrize("taker_has_work", [False, True])
def test_blocks_stolen_along_with_one_stay_ordered(
    fake: FakeCuda, giver: str, taker: str, last: str, taker_has_work: bool
) -> None:
    """The thief takes a whole bin and uses one block; the rest may go on to a third stream, or to the host."""
    size = 256 << 10
    bench = Bench(fake, limit_bytes=4 * MIB)
    first, second = KINDS[giver](bench), KINDS[taker](bench)
    blocks = [bench.allocate(size, first) for _ in range(7)]  # three slabs, with no rest
    other_work = bench.used_and_freed(64 << 10, second)[1] if taker_has_work else None
    operation = fake.enqueue(first)
    for block in blocks:
        bench.free(block, first)
    assert bench.allocate(size, second) in blocks
    assert fake.ordered(operation, second)
    if other_work is not None:
        fake.finish(other_work)
    third = None if last == "host" else KINDS[last](bench)
    bench.allocate(4 * MIB - bench.reserved_bytes)  # so that nothing is left but the stolen blocks
    assert bench.allocate(size, third) in blocks
    assert fake.done(operation) if third is None else fake.ordered(operation, third)
    assert bench.close()


def test_a_stream_whose_last_event_is_over_steals_into_its_own_lane(fake: FakeCuda) -> None:
    """Looking for finished memory ends the life of a borrowed lane: not of the one that is being served."""
    size = 16 * MIB
    bench = Bench(fake, limit_bytes=2 * size)
    giver, thief, helper, stranger = bench.owned(), bench.borrowed(), bench.owned(), bench.owned()
    # The thief's lane keeps an event, and no block: the helper has taken the block over.
    used, operation = bench.used_and_freed(size, thief)
    blocks = [bench.allocate(size, giver)]
    blocks.append(bench.allocate(size, helper))
    assert used in blocks
    fake.finish(operation)
    operation = fake.enqueue(giver)
    fake.join(giver, helper)
    for block in blocks:
        bench.free(block, giver)
    assert bench.allocate(size, thief) in blocks
    assert bench.allocate(size, stranger) in blocks
    assert fake.ordered(operation, stranger)
    assert bench.close()


def test_a_handle_that_came_back_is_another_stream(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    old = bench.borrowed()
    used, operation = bench.used_and_freed(16 * MIB, old)
    fake.destroy(old)
    new = bench.borrowed()
    assert new.handle == old.handle and new.id != old.id
    assert bench.allocate(16 * MIB, new) == used
    assert fake.ordered(operation, new)
    assert bench.close()


def test_a_borrowed_handle_is_not_used_after_its_call(bench: Bench) -> None:
    for _ in range(5):
        stream = bench.borrowed()
        bench.used_and_freed(1024, stream)
        bench.fake.destroy(stream)
        bench.allocate(1024, bench.owned())
        bench.allocate(1024)
        bench.heap.trim()
    array = bench.allocate(1024, cpu=True)
    bench.expose(array, bench.owned())
    bench.blocks.synchronize(array)
    bench.free(array)


def test_lanes_of_borrowed_streams_are_used_again(bench: Bench) -> None:
    """A program that makes a stream for each request does not leak streams."""
    for _ in range(200):
        stream = bench.borrowed()
        bench.used_and_freed(1024, stream)
        bench.fake.finish_all()
        bench.fake.destroy(stream)
        bench.heap.trim()
    assert bench.heap.numbers[4] < 10


def test_lanes_of_ended_threads_are_used_again(bench: Bench) -> None:
    def work() -> None:
        bench.fake.set_current(0)
        bench.used_and_freed(1024, bench.fake.ambient(PER_THREAD))

    for _ in range(40):
        run_in_thread(work)
        bench.fake.finish_all()
        bench.heap.drop_unused_streams()
        bench.heap.trim()
    assert bench.heap.numbers[4] < 20


def test_a_failed_allocation_leaves_no_lane_behind(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=MIB)
    for _ in range(50):
        stream = bench.borrowed()
        with pytest.raises(MemoryError):
            bench.allocate(16 * MIB, stream)
        fake.destroy(stream)
    assert bench.heap.numbers[4] < 10
    assert bench.close()


def test_a_stream_object_is_held_while_a_block_names_it_and_dropped_behind_an_event(bench: Bench) -> None:
    stream = bench.owned()
    seen = weakref.ref(bench.owners[stream])
    ptr = bench.allocate(16 * MIB, stream)
    del bench.owners[stream]
    assert bench.heap.drop_unused_streams() == 0
    gc.collect()
    assert seen() is not None, "a live block names the stream"
    operation = bench.fake.enqueue(stream)
    bench.free(ptr)
    assert bench.heap.drop_unused_streams() == 1
    assert seen() is None
    bench.fake.destroy(stream)
    assert ptr not in [bench.allocate(16 * MIB) for _ in range(8)]
    bench.fake.finish(operation)
    assert ptr in [bench.allocate(16 * MIB) for _ in range(8)]


def test_a_stream_object_that_the_program_holds_is_kept(bench: Bench) -> None:
    stream = bench.owned()
    assert bench.heap.drop_unused_streams() == 0
    assert not bench.heap.hold(stream.handle, object()), "held already"


@pytest.mark.behaviour("G1")
def test_a_block_in_use_on_another_stream_is_not_handed_out_before_that_is_over(fake: FakeCuda) -> None:
    """G1: 64 MiB of stream A, read on B, dropped, and asked for on A at once."""
    bench = Bench(fake)
    a, b = bench.owned(), bench.owned()
    x = bench.allocate(64 * MIB, a)
    bench.expose(x, b)
    reader = fake.enqueue(b)
    bench.free(x)
    y = bench.allocate(64 * MIB, a)
    assert y != x
    fake.finish(reader)
    assert bench.allocate(64 * MIB, a) == x
    assert bench.close()


@pytest.mark.behaviour("G2")
@pytest.mark.parametrize("blocked", [False, True])
def test_per_thread_streams_are_different_streams(fake: FakeCuda, blocked: bool) -> None:
    """G2: two threads, one handle value, two streams; also when there is no memory but that block."""
    bench = Bench(fake, limit_bytes=MIB if blocked else 1 << 40)
    operations: list[int] = []
    used: list[int] = []
    threads: list[int] = []
    allocate = lambda: bench.allocate(MIB, fake.ambient(PER_THREAD))  # noqa: E731

    def first() -> None:
        fake.set_current(0)
        used.append(allocate())
        threads.append(bench.ledger.allocation_of(used[0]).thread)
        operations.append(fake.enqueue(fake.ambient(PER_THREAD)))
        bench.free(used[0], fake.ambient(PER_THREAD))

    def second() -> None:
        fake.set_current(0)
        ptr = allocate()
        threads.append(bench.ledger.allocation_of(ptr).thread)
        assert blocked or ptr != used[0]
        assert not blocked or fake.ordered(operations[0], fake.ambient(PER_THREAD))

    run_in_thread(first)
    run_in_thread(second)
    assert len(set(threads)) == 2
    assert bench.close()


def test_a_view_makes_its_stream_wait_for_the_blocks_work(bench: Bench) -> None:
    a, b, c = bench.owned(), bench.owned(blocking=True), bench.fake.ambient(LEGACY)
    x = bench.allocate(MIB, a)
    first = bench.fake.enqueue(a)
    bench.order(x, b)
    assert bench.fake.ordered(first, b)
    second = bench.fake.enqueue(b)
    bench.order(x, c)
    assert bench.fake.ordered(first, c) and bench.fake.ordered(second, c)
    assert bench.fake.calls("cuEventSynchronize") == 0


def test_a_block_freed_without_a_stream_waits_for_a_borrowed_stream(bench: Bench) -> None:
    """No event can be had behind work on a handle that is not the bridge's: the block must not be handed out."""
    stream = bench.borrowed()
    ptr, operation = bench.used_and_freed(16 * MIB, stream, state_stream=False)
    assert ptr not in [bench.allocate(16 * MIB) for _ in range(8)]
    assert not bench.fake.done(operation)


def test_a_block_shown_to_a_borrowed_stream_waits_for_it(bench: Bench) -> None:
    array = bench.allocate(16 * MIB, cpu=True)
    stream = bench.borrowed()
    bench.expose(array, stream)
    operation = bench.fake.enqueue(stream)
    bench.free(array)
    assert array not in [bench.allocate(16 * MIB, cpu=True) for _ in range(8)]
    assert not bench.fake.done(operation)


def test_waiting_for_a_block_of_a_borrowed_stream_is_refused_until_it_is_held(bench: Bench) -> None:
    ptr = bench.allocate(MIB, stream := bench.borrowed())
    operation = bench.fake.enqueue(stream)
    for wait in (lambda: bench.blocks.synchronize(ptr), lambda: bench.blocks.order(ptr, bench.owned().handle)):
        with pytest.raises(BridgeError, match="bare handle"):
            wait()
    bench.adopt(stream)
    bench.blocks.synchronize(ptr)
    assert bench.fake.done(operation)
