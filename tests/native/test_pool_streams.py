"""What stream a handle means: held streams by their handle, others by their id, captured ones by neither."""

import threading

import pytest
from fake_cuda import PER_THREAD, RELAXED, FakeCuda
from fake_cuda.pool import MIB, Bench

from rmm_managed_bridge.errors import BridgeError

pytestmark = pytest.mark.fake_driver


def test_a_captured_stream_that_is_held_is_asked_nothing_but_whether_it_is_captured(bench: Bench) -> None:
    stream = bench.owned()
    ptr = bench.allocate(MIB, cpu=True)
    bench.fake.begin_capture(stream)
    bench.fake.clear()
    bench.expose(ptr, stream)
    assert set(bench.fake.trace()) == {"cuStreamIsCapturing"}
    assert bench.fake.end_capture(stream)


def test_a_captured_stream_that_nobody_knows_from_before_is_refused_in_words(fake: FakeCuda) -> None:
    """The id of one that is being captured is not relied on: a held one is known by its handle, another is refused."""
    bench = Bench(fake)
    held, unseen = bench.owned(), bench.borrowed()
    ptr = bench.allocate(MIB, cpu=True)
    asked = fake.calls("cuStreamGetId")
    fake.begin_capture(held)
    bench.expose(ptr, held)
    assert fake.end_capture(held) and fake.calls("cuStreamGetId") == asked
    fake.begin_capture(unseen)
    fake.fail("cuStreamGetId")
    with pytest.raises(BridgeError, match="is being captured, and the bridge has not seen it before"):
        bench.expose(ptr, unseen)
    assert fake.end_capture(unseen)
    bench.free(ptr)
    assert bench.close()


@pytest.mark.behaviour("G5")
def test_a_block_freed_on_a_captured_stream_that_was_never_seen_is_lost(fake: FakeCuda) -> None:
    """The id of a captured stream cannot be had, so nobody can tell later that this was the one: a leak, no reuse."""
    bench = Bench(fake, limit_bytes=16 * MIB)
    stream = bench.borrowed()
    ptr = bench.allocate(16 * MIB, cpu=True)
    fake.begin_capture(stream)
    bench.free(ptr, stream)
    assert fake.end_capture(stream)
    bench.adopt(stream)
    for taker in (None, stream):
        with pytest.raises(MemoryError, match=r"16\.0 MiB waiting"):
            bench.allocate(16 * MIB, taker, cpu=taker is None)


@pytest.mark.behaviour("G5")
@pytest.mark.parametrize("sign", ["a free", "an allocation", "another's free"])
def test_a_borrowed_stream_that_is_used_after_its_capture_lets_go_of_what_was_freed_in_it(
    fake: FakeCuda, sign: str
) -> None:
    bench = Bench(fake, limit_bytes=48 * MIB)
    stream = bench.borrowed()
    kept = bench.allocate(1024, stream)
    ptr = bench.allocate(16 * MIB, cpu=True)
    fake.begin_capture(stream)
    bench.free(ptr, stream)
    assert fake.end_capture(stream)
    if sign == "a free":
        bench.free(kept, stream)
    elif sign == "an allocation":
        bench.allocate(3 * MIB, stream)  # one that has to look for memory
    else:
        bench.free(bench.allocate(1024), stream)
    assert bench.allocate(16 * MIB, cpu=True) == ptr
    assert bench.close()


@pytest.mark.behaviour("G5")
def test_a_sign_says_nothing_of_what_came_after_it(fake: FakeCuda) -> None:
    """While one thread frees on a borrowed stream, another enqueues work there and frees during a capture of it."""
    bench = Bench(fake, limit_bytes=48 * MIB)
    stream = bench.borrowed()
    first, second = bench.allocate(16 * MIB, stream), bench.allocate(16 * MIB, stream)
    works = []

    def meanwhile() -> None:
        works.append(fake.enqueue(stream))
        fake.begin_capture(stream, RELAXED)
        bench.free(second, stream)
        assert fake.end_capture(stream)

    fake.on_call("cuEventRecord", meanwhile)
    bench.free(first, stream)
    got = all_that_is_left(bench, bench.owned(), None)
    assert first in got and second not in got and not fake.done(works[0])
    bench.adopt(stream)
    assert bench.close()


@pytest.mark.parametrize("held", [True, False])
def test_no_id_is_asked_for_of_a_stream_that_is_held(bench: Bench, held: bool) -> None:
    """It would end a capture that another thread begins just then."""
    stream = bench.owned() if held else bench.borrowed()
    other = threading.Thread(target=lambda: bench.free(bench.allocate(1024, stream), stream))
    bench.fake.clear()
    other.start()
    other.join()
    bench.order(bench.allocate(MIB, cpu=True), stream)
    bench.used_and_freed(MIB, stream)
    assert (bench.fake.calls("cuStreamGetId") == 0) == held


def test_a_captured_per_thread_stream_is_asked_nothing_but_that(bench: Bench) -> None:
    stream = bench.fake.ambient(PER_THREAD)
    ptr = bench.allocate(MIB, stream)
    shown, before = bench.allocate(MIB, cpu=True), bench.allocate(MIB, cpu=True)
    bench.expose(before, stream)
    bench.fake.begin_capture(stream)
    bench.fake.clear()
    bench.expose(shown, stream)
    bench.free(ptr, stream)
    bench.free(shown)
    bench.heap.trim()
    assert bench.fake.calls("cuStreamGetId") == 0
    assert bench.fake.end_capture(stream)
    assert bench.close()


def all_that_is_left(bench: Bench, *takers: object) -> list[int]:
    """Allocate 16 MiB again and again, for each taker, until there is no more."""
    got = []
    for taker in takers:
        try:
            while True:
                got.append(bench.allocate(16 * MIB, taker))
        except MemoryError:
            pass
    return got


@pytest.mark.behaviour("G5")
def test_streams_that_were_never_seen_do_not_share_what_they_wait_for(fake: FakeCuda) -> None:
    """Whatever the first of them is: a thread's own stream needs no event elsewhere."""
    bench = Bench(fake, limit_bytes=48 * MIB)
    first, second, third = (bench.allocate(16 * MIB) for _ in range(3))
    mine, unseen, other = fake.ambient(PER_THREAD), bench.borrowed(), bench.borrowed()
    fake.begin_capture(mine, RELAXED)
    bench.free(first, mine)
    assert fake.end_capture(mine)
    work = fake.enqueue(unseen)
    fake.begin_capture(unseen, RELAXED)
    bench.free(second, unseen)
    # The third stream's capture ends in the midst of the free: what is certain for it says nothing of the second.
    fake.begin_capture(other, RELAXED)
    fake.on_call("cuStreamIsCapturing", lambda: fake.end_capture(other))
    bench.free(third, other)
    assert bench.quarantined_bytes == 48 * MIB
    assert second not in all_that_is_left(bench, bench.owned(), None)
    assert not fake.done(work) and fake.end_capture(unseen)


@pytest.mark.behaviour("G5")
def test_a_handle_that_came_back_while_captured_is_not_taken_for_the_old_stream(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=32 * MIB)
    old = bench.borrowed()
    kept = bench.allocate(1024, old)
    fake.destroy(old)
    again = bench.borrowed()
    assert again.handle == old.handle
    ptr = bench.allocate(16 * MIB)
    work = fake.enqueue(again)
    fake.begin_capture(again, RELAXED)
    fake.on_call("cuStreamIsCapturing", lambda: fake.end_capture(again))
    bench.free(ptr, again)
    assert ptr not in all_that_is_left(bench, bench.owned(), None) and not fake.done(work)
    bench.free(kept)


@pytest.mark.behaviour("G2")
@pytest.mark.parametrize("current", [1, None])
def test_the_per_thread_stream_is_the_one_of_the_pools_device(fake: FakeCuda, current: int | None) -> None:
    """Whichever device is current by then: its captured stream is asked nothing, and refused."""
    bench = Bench(fake)
    mine = fake.ambient(PER_THREAD)
    ptr, used = bench.allocate(MIB), bench.allocate(MIB, mine)
    fake.begin_capture(mine, RELAXED)
    fake.set_current(current)
    bench.free(ptr, mine)
    with pytest.raises(BridgeError, match="being captured"):
        bench.heap.allocate(MIB, stream=PER_THREAD)
    bench.free(used, mine)
    fake.set_current(0)
    assert fake.end_capture(mine)


def test_a_held_stream_that_is_let_go_leaves_its_handle_to_others(bench: Bench) -> None:
    old = bench.owned()
    used, work = bench.used_and_freed(MIB, old)
    bench.owners.pop(old)
    bench.heap.drop_unused_streams()
    bench.fake.destroy(old)
    again = bench.borrowed()
    assert again.handle == old.handle
    bench.fake.clear()
    taken = [bench.allocate(MIB, again) for _ in range(4)]
    assert bench.fake.calls("cuStreamGetId") > 0, "what the thread remembers of the handle is not good any more"
    assert used not in taken or bench.fake.done(work) or bench.fake.ordered(work, again)


def test_devices_do_not_take_each_others_streams_for_theirs(fake: FakeCuda) -> None:
    """A handle that one pool holds means nothing to another, though one thread uses both."""
    first, second = Bench(fake), Bench(fake)
    stream = first.owned()
    used, work = first.used_and_freed(MIB, stream)
    ptr = second.allocate(MIB, stream)
    second.free(ptr, stream)
    assert ptr != used and not second.heap.holds(stream.handle) and first.heap.holds(stream.handle)
    assert not fake.done(work)
    assert first.close() and second.close()


@pytest.mark.parametrize("held", [False, True])
def test_a_stream_of_another_device_is_refused_with_both_named(fake: FakeCuda, held: bool) -> None:
    """No event of the pool's can be recorded on it, so that what is freed there would wait for ever."""
    bench = Bench(fake)
    stream, lanes = fake.stream(device=1), bench.heap.numbers[4]
    fake.set_current(1)
    try:
        for _ in range(2):
            with pytest.raises(BridgeError, match=rf"{stream.handle:#x} is a stream of device 1, .* of device 0"):
                bench.heap.allocate(MIB, stream=stream.handle, owner=object() if held else None)
    finally:
        fake.set_current(0)
    assert bench.heap.live_count == 0
    assert bench.heap.numbers[4] == lanes, "no lane was made for it"
    assert bench.close()


def test_a_stream_is_asked_for_its_device_once(fake: FakeCuda) -> None:
    bench = Bench(fake)
    stream = bench.borrowed()
    fake.clear()
    ptr = bench.allocate(MIB, stream)
    bench.free(ptr, stream)
    bench.allocate(2 * MIB, stream)
    assert fake.calls("cuStreamGetCtx") == 1
    assert bench.close()


@pytest.mark.behaviour("G1")
def test_pytorchs_record_stream_on_a_captured_stream_that_was_never_seen_is_not_forgotten(fake: FakeCuda) -> None:
    """Nothing can be raised there: the block is lost when it is freed."""
    from rmm_managed_bridge._native import torch_entry

    bench = Bench(fake, limit_bytes=16 * MIB)
    guest = torch_entry.TorchEntry(lambda handle, device: None)
    guest.use(0, bench.heap)
    stream, side = bench.owned(), bench.borrowed()
    ptr = guest.malloc(16 * MIB, 0, stream.handle)
    work = fake.enqueue(side)
    fake.begin_capture(side, RELAXED)
    guest.record_stream(ptr, side.handle)
    guest.free(ptr, 16 * MIB, 0, stream.handle)
    assert bench.quarantined_bytes == 16 * MIB
    assert fake.end_capture(side)
    with pytest.raises(RuntimeError, match="out of memory"):
        guest.malloc(16 * MIB, 0, stream.handle)
    assert not fake.done(work)


def test_a_stream_that_comes_to_be_held_while_a_block_is_freed_on_it_keeps_what_is_unfinished(
    bench: Bench, fake: FakeCuda
) -> None:
    """The event of that free stands before the work of another block that was freed there meanwhile."""
    stream = bench.borrowed()
    first, second = bench.allocate(256 << 10, stream), bench.allocate(256 << 10, stream)
    operations = []

    def meanwhile() -> None:
        operations.append(fake.enqueue(stream))
        bench.free(second, stream)
        bench.adopt(stream)

    fake.on_call("cuEventRecord", lambda: fake.on_call("cuStreamIsCapturing", meanwhile))
    bench.free(first, stream)
    assert operations
    taken = [bench.allocate(256 << 10) for _ in range(3)]
    assert not fake.done(operations[0])
    assert second not in taken
    fake.finish(operations[0])
