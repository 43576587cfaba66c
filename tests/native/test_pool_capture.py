"""Invariant 9: nothing that the pool does breaks a capture, not even one that it knows nothing of.

The fake loses captures where the real driver does; the `fake` fixture fails every test in which one was lost.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
from fake_cuda import GLOBAL, LEGACY, PER_THREAD, RELAXED, THREAD_LOCAL, FakeCuda, Stream
from fake_cuda.pool import MIB, Bench

from rmm_managed_bridge.errors import BridgeError

pytestmark = pytest.mark.fake_driver

MODES = {"global": GLOBAL, "thread-local": THREAD_LOCAL, "relaxed": RELAXED}


class Scene(NamedTuple):
    """A pool that has seen some work, before the capture begins."""

    bench: Bench
    captured: Stream
    other: Stream
    on_captured: int
    on_other: int
    array: int
    shown: int


def set_scene(bench: Bench, captured: Stream) -> Scene:
    """Return live blocks on both streams, an unused CPU block, and one shown to both; with work in flight."""
    other = bench.owned()
    scene = Scene(
        bench,
        captured,
        other,
        bench.allocate(MIB, captured),
        bench.allocate(MIB, other),
        bench.allocate(MIB, cpu=True),
        bench.allocate(MIB, cpu=True),
    )
    for stream in (other, captured):  # after a borrowed one nothing can be ordered any more
        bench.order(scene.shown, stream)
        bench.fake.enqueue(stream)
    bench.used_and_freed(MIB, other)
    bench.used_and_freed(MIB, bench.borrowed())
    return scene


def synchronize(scene: Scene, ptr: int) -> None:
    """Wait for a block; a refusal, since its stream is captured or only borrowed, is fine."""
    try:
        scene.bench.blocks.synchronize(ptr)
    except BridgeError as error:
        assert "captured" in str(error) or "bare handle" in str(error)


def steal(scene: Scene) -> None:
    """Take memory of other streams, with nothing else to be had."""
    blocks = []
    try:
        while True:
            blocks.append(scene.bench.heap.allocate(MIB, stream=scene.other.handle))
    except MemoryError:
        pass
    for block in blocks:
        scene.bench.heap.deallocate(block)


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "allocate on another stream": lambda s: s.bench.allocate(64, s.other),
    "allocate on the legacy stream": lambda s: s.bench.allocate(64, s.bench.fake.ambient(LEGACY)),
    "allocate on the per-thread stream": lambda s: s.bench.allocate(64, s.bench.fake.ambient(PER_THREAD)),
    "allocate for the host": lambda s: [s.bench.allocate(MIB, cpu=True) for _ in range(4)],
    "grow": lambda s: s.bench.allocate(96 * MIB, s.other),
    "free on the captured stream": lambda s: s.bench.free(s.on_captured, s.captured),
    "free without a stream": lambda s: s.bench.free(s.on_captured),
    "free on another stream": lambda s: s.bench.free(s.on_other, s.other),
    "free on a borrowed stream": lambda s: s.bench.free(s.on_other, s.bench.borrowed()),
    "free on the legacy stream": lambda s: s.bench.free(s.on_other, s.bench.fake.ambient(LEGACY)),
    "free a shown block": lambda s: s.bench.free(s.shown),
    "free a CPU block on the captured stream": lambda s: s.bench.free(s.array, s.captured),
    "steal": steal,
    "synchronize the captured stream's block": lambda s: synchronize(s, s.on_captured),
    "synchronize another block": lambda s: synchronize(s, s.on_other),
    "show to the legacy stream": lambda s: s.bench.order(s.on_other, s.bench.fake.ambient(LEGACY)),
    "show to another held stream": lambda s: s.bench.order(s.array, s.other),
    "trim": lambda s: s.bench.heap.trim(),
    "drop streams": lambda s: (s.bench.owners.clear(), s.bench.heap.drop_unused_streams()),
    "hold a stream": lambda s: s.bench.adopt(s.bench.borrowed()),
    "numbers": lambda s: (s.bench.heap.numbers, s.bench.ledger.snapshot()),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("owned", [True, False], ids=["owned", "borrowed"])
def test_no_operation_loses_a_capture(fake: FakeCuda, mode: str, blocking: bool, owned: bool, operation: str) -> None:
    """A refusal is fine: of memory, or of a view on the legacy stream that a captured blocking stream bars."""
    bench = Bench(fake, limit_bytes=1 << 40 if operation == "grow" else 14 * MIB)
    captured = bench.owned(blocking=blocking) if owned else bench.borrowed(blocking=blocking)
    scene = set_scene(bench, captured)
    fake.begin_capture(captured, MODES[mode])
    for action in (OPERATIONS[operation], OPERATIONS["trim"], OPERATIONS["allocate for the host"]):
        try:
            action(scene)
        except MemoryError:
            pass
        except BridgeError:
            assert blocking and operation == "show to the legacy stream"
    assert fake.end_capture(captured)
    bench.close()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("elsewhere", [True, False], ids=["of another thread", "of this thread"])
@pytest.mark.parametrize("mode", MODES)
def test_no_operation_loses_one_of_two_captures(fake: FakeCuda, mode: str, elsewhere: bool, operation: str) -> None:
    """Two at once, of a blocking and a non-blocking stream, begun on this thread or on another."""
    bench = Bench(fake, limit_bytes=1 << 40 if operation == "grow" else 26 * MIB)
    captured, second = bench.owned(blocking=True), bench.owned()
    kept = [bench.owners[each] for each in (captured, second)]  # by whoever captures
    beside = bench.allocate(MIB, second)
    scene = set_scene(bench, captured)

    def begin() -> None:
        for stream in (captured, second):
            fake.begin_capture(stream, MODES[mode])

    if elsewhere:
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
    else:
        begin()
    bench.free(beside, second)
    for action in (OPERATIONS[operation], OPERATIONS["allocate for the host"], OPERATIONS["trim"]):
        try:
            action(scene)
        except MemoryError:
            pass
        except BridgeError:
            assert operation == "show to the legacy stream"
    for stream in (captured, second):
        with pytest.raises(BridgeError, match="captured"):
            bench.heap.allocate(64, stream=stream.handle)
    assert fake.end_capture(second)
    bench.allocate(64, second)  # its capture is over, the other one is not
    assert fake.end_capture(captured)
    del kept
    bench.close()


@pytest.mark.behaviour("G5")
@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_memory_asked_for_during_a_capture_is_refused_before_the_driver_is_touched(
    bench: Bench, mode: str, owned: bool
) -> None:
    """G5, first: the error names the stream, the capture ends cleanly, and afterwards the request is served."""
    stream = bench.owned() if owned else bench.borrowed()
    bench.fake.begin_capture(stream, MODES[mode])
    bench.fake.clear()
    with pytest.raises(BridgeError, match="captured"):
        bench.allocate(MIB, stream)
    assert bench.fake.trace() == ["cuStreamIsCapturing"]
    failure = bench.ledger.history().events[-1]
    assert failure.action == "failure" and failure.requested_bytes == MIB and failure.stream == stream.handle
    assert bench.fake.end_capture(stream)
    assert bench.allocate(MIB, stream)


@pytest.mark.behaviour("G5")
@pytest.mark.parametrize("how", ["stated", "unstated", "shown", "cpu"])
@pytest.mark.parametrize("owned", [True, False])
def test_a_block_let_go_during_a_capture_is_held_until_it_has_ended(fake: FakeCuda, owned: bool, how: str) -> None:
    """G5, second: nobody gets the block while the graph that may use it is being made; later it is used again."""
    if not owned and how != "stated":
        pytest.skip("the bridge cannot know when the capture of a borrowed stream ends, unless it is told")
    bench = Bench(fake, limit_bytes=16 * MIB)
    stream = bench.owned() if owned else bench.borrowed()
    ptr = bench.allocate(16 * MIB, None if how == "cpu" else stream, cpu=how == "cpu")
    if how == "shown":
        bench.order(ptr, stream)
    fake.begin_capture(stream)
    bench.free(ptr, stream if how in ("stated", "cpu") else None)
    for taker in (None, bench.borrowed(), bench.owned(), fake.ambient(LEGACY)):
        with pytest.raises(MemoryError):
            bench.allocate(16 * MIB, taker, cpu=how == "cpu")
    bench.heap.trim()
    assert bench.reserved_bytes == 16 * MIB
    assert fake.end_capture(stream)
    bench.adopt(stream)
    assert bench.allocate(16 * MIB, cpu=how == "cpu") == ptr
    assert bench.close()


def test_a_quarantined_block_of_a_captured_borrowed_stream_waits_for_that_stream(bench: Bench) -> None:
    """The number of a stream's lane is not given to another one while a block waits for the stream."""
    captured = bench.borrowed()
    array = bench.allocate(MIB, cpu=True)
    bench.fake.begin_capture(captured)
    bench.free(array, captured)
    for _ in range(3):
        stranger = bench.borrowed()
        bench.used_and_freed(1024, stranger)
        bench.adopt(stranger)
    bench.fake.finish_all()
    bench.fake.clear()
    assert array not in [bench.allocate(MIB, cpu=True) for _ in range(16)]
    assert bench.fake.end_capture(captured)


MOMENTS = [
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamIsCapturing",
    "cuStreamGetId",
    "cuEventCreate",
    "cuEventRecord",
]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("action", ["allocate", "free", "steal", "order", "synchronize"])
def test_a_capture_that_begins_in_the_middle_of_a_call_survives_it(fake: FakeCuda, moment: str, action: str) -> None:
    bench = Bench(fake, limit_bytes=32 * MIB)
    first, second = bench.owned(), bench.owned()
    ptr = bench.allocate(16 * MIB, first)
    bench.used_and_freed(16 * MIB, first)
    fake.on_call(moment, lambda: fake.begin_capture(first))
    try:
        if action == "allocate":
            bench.allocate(16 * MIB, first)
        elif action == "free":
            bench.free(ptr, first)
        elif action == "steal":
            bench.allocate(16 * MIB, second)
        elif action == "order":
            bench.order(ptr, second)
        else:
            bench.blocks.synchronize(ptr)
    except (BridgeError, MemoryError):
        pass
    began = fake.lib.fake_begin_capture(first.id, GLOBAL) == 0
    fake.on_call(moment, lambda: None)  # in case that call was not made
    assert fake.end_capture(first), "begun in the call" if began else "begun after it"
    bench.close()


def test_stats_and_reads_of_the_driver_keep_the_threads_mode_and_context(bench: Bench) -> None:
    """Every exchange and push is undone."""
    bench.fake.set_current(1)
    stream = bench.owned()
    bench.used_and_freed(MIB, stream)
    array = bench.allocate(MIB, cpu=True)
    bench.order(array, stream)
    bench.blocks.synchronize(array)
    bench.heap.trim()
    assert bench.fake.lib.fake_thread_mode() == GLOBAL
    assert bench.fake.lib.fake_context_depth() == 1
    assert bench.native_process.current_device() == 1
    bench.fake.set_current(0)


def test_a_stream_whose_capture_nobody_can_end_is_let_go(bench: Bench) -> None:
    """Its destruction ends the capture, as without the bridge: until then its mode bars calls of the program."""
    stream = bench.owned()
    bench.used_and_freed(MIB, stream)
    bench.fake.begin_capture(stream)
    bench.owners.pop(stream)
    assert bench.heap.drop_unused_streams() == 1
    bench.fake.destroy(stream)  # as the object's end does
    bench.heap.trim()
    other = bench.owned()
    bench.free(bench.allocate(MIB, other))
    assert bench.fake.violations() == [], "its handle is never used again"
    assert bench.quarantined_bytes == MIB, "a leak, never a block that work may still touch"
    bench.fake.clear()


def test_a_capture_whose_stream_somebody_has_goes_on(bench: Bench) -> None:
    stream = bench.owned()
    bench.fake.begin_capture(stream)
    assert bench.heap.drop_unused_streams() == 0
    bench.heap.trim()
    assert bench.fake.end_capture(stream)
