"""Invariants 1-3, 5, 6, 9 and 12 over the real pool, driven by Hypothesis against a model of what is still in use.

The model does what a careful program does: it uses a block only on the stream it was allocated on and on those it was
shown to, and where it states a stream at a free, it has ordered the block's own stream before that one. Then every
block that comes out of the pool must be safe for whoever asked. BRIDGE_MACHINE_EXAMPLES makes a long run of it,
BRIDGE_MACHINE_RAW leaves failures as they were found.
"""

import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers import fake_cuda
from helpers.fake_cuda import GLOBAL, LEGACY, PER_THREAD, RELAXED, THREAD_LOCAL, FakeCuda, Stream
from helpers.fake_cuda_pool import EVERYTHING, KIB, MIB, Bench, Owner
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rmm_managed_bridge.errors import BridgeError

pytestmark = pytest.mark.fake_driver

EXAMPLES = int(os.environ.get("BRIDGE_MACHINE_EXAMPLES", "0"))
STEPS = 60
PAGE_BITS = 16
PUSHED = {"cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent", "cuCtxPopCurrent"}
# Few sizes, so that memory is used again; from slabs, with a slab for few blocks, and with a span of their own.
SIZES = st.sampled_from([256 * KIB, 256 * KIB, 256 * KIB, 1 * KIB, MIB, 3 * MIB])
PICK = st.integers(0, 27)


@dataclass(eq=False)
class Line:
    """A stream as the program sees it."""

    stream: Stream
    held: bool  # by the bridge, or for ever there
    thread: int = 0  # where its handle means it
    usable: bool = True
    captured: bool = False
    needs_sign: bool = False  # a block waits for a sign that the capture of this borrowed stream is over

    @property
    def legacy(self) -> bool:
        return self.stream.handle == LEGACY


@dataclass(eq=False)
class Block:
    """A block, live or freed, and the unfinished work that touches it."""

    ptr: int
    size: int
    bench: Bench
    cpu: bool
    line: Line | None
    shown: list[Line] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)  # which the bridge cannot know of: see `copy_out`
    graphs: list[Line] = field(default_factory=list)  # captured while the block was used there

    def overlaps(self, other: "Block") -> bool:
        return self.ptr < other.ptr + other.size and other.ptr < self.ptr + self.size


class PoolMachine(RuleBasedStateMachine):
    """Two devices, two threads, streams of all kinds."""

    threads = (ThreadPoolExecutor(1), ThreadPoolExecutor(1))

    def __init__(self) -> None:
        super().__init__()
        self.fake: FakeCuda = fake_cuda.load()
        self.fake.reset()
        self.lines: list[Line] = []
        self.live: list[Block] = []
        self.freed: list[Block] = []
        self.benches: list[Bench] = []

    @initialize(limits=st.tuples(*[st.sampled_from([2 * MIB, 4 * MIB, 4 * MIB, 12 * MIB, EVERYTHING])] * 2))
    def start(self, limits: tuple[int, int]) -> None:
        """Small limits make the pool steal and wait."""
        self.benches = [Bench(self.fake, device=i, limit_bytes=limit) for i, limit in enumerate(limits)]
        for thread in self.threads:
            thread.submit(self.fake.set_current, 0).result()
        for device in range(2):
            self.lines.append(Line(self.fake.ambient(LEGACY, device), True))
        for number in range(2):
            stream = self.on(number, lambda: self.fake.ambient(PER_THREAD))
            self.lines.append(Line(stream, True, number))
        for blocking in (False, True):
            for hold in (False, True):
                self.create_stream(0, blocking, hold)

    # --- choosing ---

    def on(self, thread: int, action: Callable[[], Any]) -> Any:
        return self.threads[thread].submit(action).result()

    def call(self, line: Line | None, action: Callable[[], Any]) -> Any:
        """Run what names a stream on a thread where its handle means it."""
        return self.on(0 if line is None else line.thread, action)

    def line(self, pick: int, want: Callable[[Line], bool] = lambda line: True) -> Line | None:
        found = [line for line in self.lines if line.usable and want(line)]
        return found[pick % len(found)] if found else None

    def block(self, pick: int) -> Block:
        return self.live[pick % len(self.live)]

    def capturing(self) -> bool:
        return any(line.captured for line in self.lines)

    def legacy_is_barred(self, device: int) -> bool:
        return any(x.captured and x.stream.blocking and x.stream.device == device for x in self.lines)

    # --- streams ---

    @precondition(lambda self: len(self.lines) < 16)
    @rule(device=st.sampled_from([0, 0, 0, 1]), blocking=st.booleans(), hold=st.booleans())
    def new_stream(self, device: int, blocking: bool, hold: bool) -> None:
        self.create_stream(device, blocking, hold)

    def create_stream(self, device: int, blocking: bool, hold: bool) -> None:
        line = Line(self.fake.stream(device=device, blocking=blocking), False)
        self.lines.append(line)
        if hold:
            self.hold(line)

    def hold(self, line: Line) -> None:
        bench = self.benches[line.stream.device]
        owner = bench.owners[line.stream] = Owner()
        weakref.finalize(owner, self.fake.destroy, line.stream).atexit = False
        if bench.heap.adopt(line.stream.handle, owner):
            line.held, line.needs_sign = True, False

    @rule(pick=PICK)
    def adopt(self, pick: int) -> None:
        line = self.line(
            pick, lambda x: not x.held and not x.captured and x.stream not in self.benches[x.stream.device].owners
        )
        if line is not None:
            self.hold(line)

    @rule(pick=PICK)
    def destroy_stream(self, pick: int) -> None:
        """A borrowed stream goes at once; of a held one the program only drops its object."""
        line = self.line(
            pick, lambda x: x.stream.handle not in (LEGACY, PER_THREAD) and not x.captured and not x.needs_sign
        )
        if line is None:
            return
        line.usable = False
        if self.benches[line.stream.device].owners.pop(line.stream, None) is None:
            self.fake.destroy(line.stream)

    @rule(device=st.integers(0, 1))
    def drop_unused_streams(self, device: int) -> None:
        self.on(0, self.benches[device].heap.drop_unused_streams)

    # --- memory ---

    @rule(pick=PICK, size=SIZES, count=st.integers(1, 3))
    def allocate_on_stream(self, pick: int, size: int, count: int) -> None:
        for _ in range(count):
            self.allocate(size, self.line(pick), pick)

    @rule(size=SIZES, device=st.integers(0, 1), cpu=st.booleans(), count=st.integers(1, 3))
    def allocate_for_host(self, size: int, device: int, cpu: bool, count: int) -> None:
        for _ in range(count):
            self.allocate(size, None, device, cpu=cpu)

    @rule(
        size=SIZES, giver=PICK, taker=PICK, count=st.integers(2, 8), state_stream=st.booleans(), for_host=st.booleans()
    )
    def hand_over(self, size: int, giver: int, taker: int, count: int, state_stream: bool, for_host: bool) -> None:
        """One stream uses and frees blocks; another one, or the host, wants some of them at once."""
        line = self.line(giver)
        blocks = [block for _ in range(count) if (block := self.allocate(size, line, giver)) is not None]
        for block in blocks:
            self.use_on(block, 0)
        for block in blocks:
            self.let_go(block, 1, state_stream)
        for _ in range(min(count, 3)):
            self.allocate(size, None if for_host else self.line(taker), giver)

    def allocate(self, size: int, line: Line | None, pick: int, *, cpu: bool = False) -> Block | None:
        bench = self.benches[pick % 4 == 3 if line is None else line.stream.device]
        self.nothing_was_broken()
        self.fake.clear()
        try:
            ptr = self.call(line, lambda: bench.allocate(size, line and line.stream, cpu=cpu))
        except MemoryError:
            return None
        except BridgeError:
            assert line is not None and line.captured, "only a capture is a reason to refuse a good stream"
            asked = set(self.fake.trace()) - PUSHED  # around what is asked of a thread's own stream
            assert asked == {"cuStreamIsCapturing"}, "refused before the driver is touched"
            return None
        assert line is None or not line.captured, "memory was given to a capture"
        block = Block(ptr, size, bench, cpu, line)
        self.live.append(block)
        self.check_handed_out(block)
        return block

    def check_handed_out(self, block: Block) -> None:
        for old in self.freed:
            if not old.overlaps(block):
                continue
            assert not any(line.captured for line in old.graphs), "the block of a capture that goes on was handed out"
            for operation in old.operations + old.copies:
                if block.line is None:
                    assert self.fake.done(operation), "host-ordered memory with unfinished device work"
                else:
                    assert self.fake.ordered(operation, block.line.stream), (
                        "memory whose work the stream does not follow"
                    )
        self.freed = [old for old in self.freed if self.still_used(old)]
        pages = set(range(block.ptr >> PAGE_BITS, (block.ptr + block.size - 1 >> PAGE_BITS) + 1))
        for other in self.live:
            if other.cpu != block.cpu:
                ends = other.ptr >> PAGE_BITS, other.ptr + other.size - 1 >> PAGE_BITS
                assert not pages.intersection(range(ends[0], ends[1] + 1)), "CPU and GPU blocks share a page"

    def still_used(self, block: Block) -> bool:
        block.operations = [each for each in block.operations if not self.fake.done(each)]
        block.copies = [each for each in block.copies if not self.fake.done(each)]
        return bool(block.operations or block.copies) or any(line.captured for line in block.graphs)

    @precondition(lambda self: self.live)
    @rule(which=PICK, pick=PICK, state_stream=st.booleans())
    def free(self, which: int, pick: int, state_stream: bool) -> None:
        self.let_go(self.block(which), pick, state_stream)

    def let_go(self, block: Block, pick: int, state_stream: bool) -> None:
        stated = self.stream_to_state(block, pick) if state_stream else None
        if stated is None and block.line is not None and not block.line.held:
            return  # nobody could tell when such work ends
        if stated is not None and block.line is not None and stated is not block.line:
            self.fake.join(block.line.stream, stated.stream)
        self.live.remove(block)
        self.freed.append(block)
        for line in (stated, *block.graphs):
            if line is not None and line.captured and not line.held:
                line.needs_sign = True
        self.call(stated, lambda: block.bench.free(block.ptr, stated and stated.stream))

    def stream_to_state(self, block: Block, pick: int) -> Line | None:
        if block.line is not None and block.line.captured:
            return block.line  # nothing outside the capture can be ordered behind it
        near = [block.line] if block.line is not None and block.line.usable else []
        if near and pick % 3:
            return near[0]
        device = block.bench.device
        return self.line(
            pick,
            lambda x: x.stream.device == device and not x.captured and not (x.legacy and self.legacy_is_barred(device)),
        )

    @precondition(lambda self: self.live)
    @rule(which=PICK, pick=PICK, order=st.booleans())
    def show(self, which: int, pick: int, order: bool) -> None:
        """A view (`order`), or `record_stream`."""
        block = self.block(which)
        line = self.line(pick, lambda x: x.held and x.stream.device == block.bench.device)
        if line is None:
            return
        borrowed = block.line is not None and not block.line.held
        try:
            if not order:
                self.call(line, lambda: block.bench.expose(block.ptr, line.stream))
            else:
                self.call(line, lambda: block.bench.order(block.ptr, line.stream))
                for operation in block.operations:
                    assert self.fake.ordered(operation, line.stream), (
                        "a view whose stream does not follow the block's work"
                    )
        except BridgeError:
            assert self.capturing() or borrowed
        else:
            block.shown.append(line)

    @precondition(lambda self: self.live)
    @rule(which=PICK, pick=PICK, host=st.booleans())
    def use(self, which: int, pick: int, host: bool) -> None:
        """Enqueue a kernel, or a Python function."""
        self.use_on(self.block(which), pick, host=host)

    def use_on(self, block: Block, pick: int, *, host: bool = False) -> None:
        lines = [x for x in (block.line, *block.shown) if x is not None and x.usable]
        lines = [x for x in lines if not (x.legacy and self.legacy_is_barred(x.stream.device))]
        if not lines:
            return
        line = lines[pick % len(lines)]
        operation = self.fake.enqueue(line.stream, host=host)
        if operation >= 0:
            block.operations.append(operation)
        else:
            block.graphs.append(line)

    @precondition(lambda self: any(block.cpu for block in self.live))
    @rule(which=PICK, pick=PICK)
    def copy_out(self, which: int, pick: int) -> None:
        """A copy with cudaMemcpyDefault out of a NumPy block: nobody tells the bridge, which only holds the stream."""
        blocks = [block for block in self.live if block.cpu]
        block = blocks[which % len(blocks)]
        line = self.line(pick, lambda x: x.stream in block.bench.owners and not x.captured)
        if line is not None and line.held:
            block.copies.append(self.fake.enqueue(line.stream))

    @precondition(lambda self: self.live)
    @rule(which=PICK)
    def synchronize(self, which: int) -> None:
        block = self.block(which)
        try:
            self.on(0, lambda: block.bench.blocks.synchronize(block.ptr))
        except BridgeError:
            assert self.capturing() or (block.line is not None and not block.line.held)
        else:
            assert all(self.fake.done(each) for each in block.operations)

    @rule(device=st.integers(0, 1))
    def trim(self, device: int) -> None:
        self.on(0, self.benches[device].heap.trim)

    # --- the device ---

    @rule(pick=PICK, count=st.integers(1, 4))
    def advance(self, pick: int, count: int) -> None:
        self.fake.advance(self.lines[pick % len(self.lines)].stream, count)

    @rule(pick=PICK, mode=st.sampled_from([GLOBAL, THREAD_LOCAL, RELAXED]))
    def begin_capture(self, pick: int, mode: int) -> None:
        line = self.line(pick, lambda x: not x.legacy and not x.captured)
        if line is not None and sum(x.captured for x in self.lines) < 2:
            self.call(line, lambda: self.fake.begin_capture(line.stream, mode))
            line.captured = True

    @rule(pick=PICK)
    def end_capture(self, pick: int) -> None:
        line = self.line(pick, lambda x: x.captured)
        if line is not None:
            line.captured = False
            assert self.call(line, lambda: self.fake.end_capture(line.stream)), "a capture was lost"

    # --- what holds after every step ---

    @invariant()
    def nothing_was_broken(self) -> None:
        assert self.fake.violations() == []

    @invariant()
    def the_books_are_right(self) -> None:
        for bench in self.benches:
            reserved, used, quarantined, _, _ = bench.heap.numbers
            assert bench.heap.live_count == len(bench.live)
            assert bench.heap.live_bytes == sum(size for size, _ in bench.live.values())
            assert bench.heap.live_bytes <= used and used + quarantined <= reserved

    def teardown(self) -> None:
        """All goes back: no block, no stream object and no byte is left."""
        for line in self.lines:
            if line.captured:
                line.captured = False
                self.call(line, lambda line=line: self.fake.end_capture(line.stream))
            if line.needs_sign and not line.held and line.usable:
                self.on(0, lambda line=line: self.hold(line))
        self.fake.finish_all()
        while self.live:
            before = len(self.live)
            self.free(0, 0, False)
            if len(self.live) == before:
                self.free(0, 1, True)
        self.fake.finish_all()
        for bench in self.benches:
            bench.owners.clear()
            self.on(0, bench.heap.trim)
            self.on(0, bench.heap.drop_unused_streams)
            assert self.on(0, bench.heap.retire), "the pool could not close"
            assert bench.reserved_bytes == 0 and bench.quarantined_bytes == 0
        self.nothing_was_broken()


def test_the_pool_is_safe_in_every_interleaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic as it stands; random and as long as wanted with BRIDGE_MACHINE_EXAMPLES."""
    monkeypatch.setattr("rmm_managed_bridge._native.pressure.collect_garbage", lambda: None)
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=EXAMPLES or 1000,
            stateful_step_count=STEPS,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
            phases=[Phase.generate] if os.environ.get("BRIDGE_MACHINE_RAW") else [Phase.generate, Phase.shrink],
        ),
    )
