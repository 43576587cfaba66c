"""PyTorch's native entry points on the fake driver, called as PyTorch calls them: without the GIL, with handles."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_cuda import GLOBAL, PER_THREAD, RELAXED, THREAD_LOCAL, FakeCuda, Stream
from fake_cuda.pool import MIB, Bench

from rmm_managed_bridge._native import ledger, torch_entry

pytestmark = pytest.mark.fake_driver


def guest_of(*benches: Bench, hold: Callable[[int, int], None] = lambda handle, device: None) -> Any:
    """Return PyTorch's entry points on the heaps of `benches`."""
    guest = torch_entry.TorchEntry(hold)
    for device in range(2):
        guest.use(device, None)
    for bench in benches:
        guest.use(bench.device, bench.heap)
    return guest


def on_a_thread(action: Callable[[], None]) -> None:
    """Run `action` on another thread, and raise what it raised."""
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


@pytest.mark.behaviour("D1")
def test_work_on_one_device_never_lands_on_another(fake: FakeCuda) -> None:
    """D1: allocated for device 1 and freed from a thread whose current device is 0, which stays current."""
    benches = [Bench(fake, device=device) for device in range(2)]
    guest = guest_of(*benches)
    stream = benches[1].owned()
    fake.set_current(0)
    ptr = guest.malloc(MIB, 1, stream.handle)
    assert (fake.lib.fake_current(), fake.lib.fake_context_depth()) == (0, 1)
    assert ledger.allocation_of(ptr).device == 1
    assert [bench.heap.live_bytes for bench in benches] == [0, MIB]
    assert benches[0].reserved_bytes == 0

    def free() -> None:
        fake.set_current(0)
        guest.free(ptr, MIB, 1, stream.handle)
        assert (fake.lib.fake_current(), fake.lib.fake_context_depth()) == (0, 1)

    on_a_thread(free)
    assert [bench.heap.live_bytes for bench in benches] == [0, 0]
    assert guest.malloc(MIB, 1, stream.handle) == ptr
    guest.free(ptr, MIB, 1, stream.handle)
    assert all(bench.close() for bench in benches)


@pytest.mark.behaviour("D1")
def test_a_thread_without_a_device_frees_and_allocates(fake: FakeCuda) -> None:
    """As PyTorch's autograd threads do before their first kernel."""
    bench = Bench(fake, device=1)
    guest = guest_of(bench)
    ptr = guest.malloc(MIB, 1, 0)

    def work() -> None:
        fake.set_current(None)
        other = guest.malloc(48 * MIB, 1, 0)
        guest.free(ptr, MIB, 1, 0)
        guest.free(other, 48 * MIB, 1, 0)
        assert fake.lib.fake_context_depth() == 0

    on_a_thread(work)
    assert bench.close()


def test_blocks_freed_on_a_stream_are_ordered_behind_it(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    guest = guest_of(bench)
    first, second = bench.owned(), bench.owned()
    ptr = guest.malloc(16 * MIB, 0, first.handle)
    work = fake.enqueue(first)
    guest.free(ptr, 16 * MIB, 0, first.handle)
    assert guest.malloc(16 * MIB, 0, second.handle) == ptr
    assert fake.ordered(work, second) and not fake.done(work)
    guest.free(ptr, 16 * MIB, 0, second.handle)
    assert bench.close()


@pytest.mark.parametrize(("how", "limit"), [("held", 16 * MIB), ("used again", 32 * MIB)])
def test_a_block_of_a_stream_that_nobody_holds_waits_until_it_is_held_or_used_again(
    fake: FakeCuda, how: str, limit: int
) -> None:
    """PyTorch's free is no place to use the handle in, but its next allocation is."""
    bench = Bench(fake, limit_bytes=limit)
    guest = guest_of(bench)
    stream = bench.borrowed()
    ptr = guest.malloc(16 * MIB, 0, stream.handle)
    work = fake.enqueue(stream)
    fake.clear()
    guest.free(ptr, 16 * MIB, 0, stream.handle)
    assert fake.trace() == []
    assert bench.quarantined_bytes == 16 * MIB
    if how == "held":
        bench.adopt(stream)
    else:
        guest.free(guest.malloc(1024, 0, stream.handle), 1024, 0, stream.handle)
    assert bench.allocate(16 * MIB) == ptr
    assert fake.done(work)
    bench.adopt(stream)
    assert bench.close()


def test_a_stream_of_torchs_own_is_held_soon_and_then_needs_no_events(fake: FakeCuda) -> None:
    bench = Bench(fake)
    stream = bench.borrowed()
    held: list[tuple[int, int]] = []

    def hold(handle: int, device: int) -> None:
        held.append((handle, device))
        bench.adopt(stream)

    guest = guest_of(bench, hold=hold)
    ptrs: list[int] = []
    on_a_thread(lambda: ptrs.append(guest.malloc(MIB, 0, stream.handle)))
    for _ in range(1000):  # a pending call is made between two instructions of the main thread
        if held:
            break
    assert held == [(stream.handle, 0)]
    fake.clear()
    guest.free(ptrs[0], MIB, 0, stream.handle)
    assert guest.malloc(MIB, 0, stream.handle) == ptrs[0]
    assert fake.calls("cuEventRecord") == 0
    guest.free(ptrs[0], MIB, 0, stream.handle)
    assert held == [(stream.handle, 0)]
    assert bench.close()


def test_a_stream_that_is_gone_when_its_block_is_freed_is_not_touched(fake: FakeCuda) -> None:
    """An ExternalStream may be: its handle is dead, or another stream's by now. The block is lost, not reused."""
    bench = Bench(fake, limit_bytes=32 * MIB)
    guest = guest_of(bench)
    gone = bench.borrowed()
    dead, stolen = (guest.malloc(16 * MIB, 0, gone.handle) for _ in range(2))
    fake.destroy(gone)
    fake.clear()
    guest.free(dead, 16 * MIB, 0, gone.handle)
    assert fake.trace() == []
    other = bench.borrowed()
    assert other.handle == gone.handle
    guest.free(stolen, 16 * MIB, 0, other.handle)
    for taker in (other.handle, 0):
        with pytest.raises(RuntimeError, match="out of memory"):
            guest.malloc(16 * MIB, 0, taker)
    assert bench.quarantined_bytes == 32 * MIB


@pytest.mark.behaviour("G1")
@pytest.mark.parametrize("owned", [True, False])
def test_record_stream_keeps_a_block_until_that_stream_is_done(fake: FakeCuda, owned: bool) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    stream, side = bench.owned(), bench.borrowed()
    guest = guest_of(bench, hold=lambda handle, device: bench.adopt(side))
    ptr = guest.malloc(16 * MIB, 0, stream.handle)
    if owned:
        bench.adopt(side)
    guest.record_stream(ptr, side.handle)
    work = fake.enqueue(side)
    guest.free(ptr, 16 * MIB, 0, stream.handle)
    assert bench.quarantined_bytes == 16 * MIB
    assert guest.malloc(16 * MIB, 0, stream.handle) == ptr, "after a wait for the side stream"
    assert fake.done(work)
    guest.free(ptr, 16 * MIB, 0, stream.handle)
    guest.record_stream(0, side.handle)
    guest.record_stream(0x1234_5678_9000, side.handle)
    assert bench.close()


@pytest.mark.behaviour("G5")
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_tensor_asked_for_in_a_capture_is_refused_and_the_capture_lives(bench: Bench, mode: int, pool: bool) -> None:
    fake, guest = bench.fake, guest_of(bench)
    stream, other = bench.owned(), bench.owned()
    ptr = guest.malloc(MIB, 0, stream.handle)
    fake.begin_capture(stream, mode)
    with pytest.raises(RuntimeError, match="being captured; make tensors before the capture begins"):
        guest.malloc(MIB, 0, stream.handle, pool=pool)
    guest.free(ptr, MIB, 0, stream.handle)
    elsewhere = guest.malloc(40 * MIB, 0, other.handle, pool=pool)
    guest.record_stream(elsewhere, stream.handle)
    assert elsewhere != ptr
    guest.free(elsewhere, 40 * MIB, 0, other.handle)
    assert fake.end_capture(stream)
    failure = ledger.history().events[-1]
    assert (failure.action, failure.framework, failure.stream) == ("failure", "torch", stream.handle)


def test_a_handle_that_is_no_stream_is_refused(bench: Bench) -> None:
    guest = guest_of(bench)
    bench.fake.fail("cuStreamGetId", result=400)
    with pytest.raises(RuntimeError, match="is not a stream of this device"):
        guest.malloc(MIB, 0, bench.borrowed().handle)


@pytest.mark.behaviour("G2")
def test_per_thread_streams_are_told_apart(fake: FakeCuda) -> None:
    """G2: their handle is the same in every thread; the second one gets no block before the first one's work."""
    bench = Bench(fake, limit_bytes=16 * MIB)
    guest = guest_of(bench)
    mine = fake.ambient(PER_THREAD)
    ptr = guest.malloc(16 * MIB, 0, PER_THREAD)
    work = fake.enqueue(mine)
    guest.free(ptr, 16 * MIB, 0, PER_THREAD)
    streams: list[Stream] = []

    def take() -> None:
        fake.set_current(0)
        streams.append(fake.ambient(PER_THREAD))
        got = guest.malloc(16 * MIB, 0, PER_THREAD)
        assert fake.done(work) or fake.ordered(work, streams[0])
        guest.free(got, 16 * MIB, 0, PER_THREAD)

    on_a_thread(take)
    assert streams[0].id != mine.id
    assert bench.close()
