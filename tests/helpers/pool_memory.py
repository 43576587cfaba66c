"""The state machine over the pool's memory: blocks, what may still touch them, and what holds after every step; see
native/test_pool_machine.py.
"""

import ctypes
import os
from typing import Any

import pytest
from fake_cuda.pool import EVERYTHING, KIB, MIB, Bench
from helpers.forked import USES, attempt, in_forked_child
from helpers.pool_machine import PICK, Block, Line, StreamMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from rmm_managed_bridge._native import messages, numpy_handler
from rmm_managed_bridge.errors import BridgeError

EXAMPLES = int(os.environ.get("BRIDGE_MACHINE_EXAMPLES", "0"))
STEPS = 60
PAGE_BITS = 16
EDGE = 16
PUSHED = {"cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent", "cuCtxPopCurrent"}
# Few sizes, so that memory is used again; from slabs, with a slab for few blocks, and with a span of their own.
SIZES = st.sampled_from([256 * KIB, 256 * KIB, 256 * KIB, 1 * KIB, MIB, 3 * MIB])
TRIED = sorted(USES)


class PoolMachine(StreamMachine):
    """The memory of that program."""

    handler = numpy_handler.NumpyHandler()  # resizes blocks of any pool
    forks = 0
    struck = 0  # how often something was done inside of a call

    @initialize(
        limits=st.tuples(*[st.sampled_from([2 * MIB, 4 * MIB, 4 * MIB, 12 * MIB, EVERYTHING])] * 2),
        quarantine=st.sampled_from([EVERYTHING, 256 * KIB]),
    )
    def start(self, limits: tuple[int, int], quarantine: int) -> None:
        """Small limits make the pool steal and wait; so does a budget, if it is too small for the bridge's thread."""
        settings: dict[str, Any] = {"quarantine_limit_bytes": quarantine, "patience_ms": 0}
        budget = {"retain": "budget", "spare_bytes": 0, "recent_ms": 10_000_000} if limits[0] <= 64 * MIB else {}
        self.benches = [
            Bench(self.fake, device=0, limit_bytes=limits[0], **settings, **budget),
            Bench(self.fake, device=1, limit_bytes=limits[1], **settings),
        ]
        self.start_streams()

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
            if block in self.live:  # and has not been freed inside of a call here
                self.let_go(block, 1, state_stream)
        for _ in range(min(count, 3)):
            self.allocate(size, None if for_host else self.line(taker), giver)

    def allocate(self, size: int, line: Line | None, pick: int, *, cpu: bool = False) -> Block | None:
        if line is not None and not line.usable:
            return None  # it has been let go inside of a call
        bench = self.benches[pick % 4 == 3 if line is None else line.stream.device]
        self.nothing_was_broken()
        self.fake.clear()
        captured, struck = line is not None and line.captured, self.struck
        try:
            ptr = self.call("allocate", line, lambda: bench.allocate(size, line and line.stream, cpu=cpu))
        except MemoryError:
            return None
        except BridgeError:
            assert captured, "only a capture is a reason to refuse a good stream"
            if struck != self.struck:
                return None  # the trace tells of other calls too
            asked = set(self.fake.trace()) - PUSHED  # around what is asked of a thread's own stream
            assert asked == {"cuStreamIsCapturing"}, "refused before the driver is touched"
            return None
        assert line is None or not line.captured, "memory was given to a capture"
        block = Block(ptr, size, bench, cpu, line)
        self.live.append(block)
        self.check_handed_out(block)
        self.mark(block)
        return block

    def check_handed_out(self, block: Block) -> None:
        for old in self.freed:
            if not old.overlaps(block):
                continue
            assert not old.in_capture(), "the block of a capture that goes on was handed out"
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
        return bool(block.operations or block.copies) or block.in_capture()

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
        self.check_mark(block)
        self.live.remove(block)
        self.freed.append(block)
        for line in (stated, *(line for line, _ in block.graphs)):
            if line is not None and line.captured and not line.held:
                line.needs_sign = True
        self.call("free", stated, lambda: block.bench.free(block.ptr, stated and stated.stream))

    def stream_to_state(self, block: Block, pick: int) -> Line | None:
        if block.line is not None and block.line.captured:
            # Nothing outside the capture can be ordered behind it.
            return block.line if self.usable(block.line) else None
        near = [block.line] if block.line is not None and self.usable(block.line) else []
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
        self.show_to(self.block(which), pick, order=order)

    def show_to(self, block: Block, pick: int, *, order: bool) -> None:
        line = self.line(pick, lambda x: x.held and x.stream.device == block.bench.device)
        if line is None:
            return
        may_refuse, begun, before = self.may_refuse(block), self.begun, list(block.operations)
        try:
            if not order:
                self.call("expose", line, lambda: block.bench.expose(block.ptr, line.stream), block)
            else:
                self.call("order", line, lambda: block.bench.order(block.ptr, line.stream), block)
                for operation in before:
                    assert self.fake.ordered(operation, line.stream), (
                        "a view whose stream does not follow the block's work"
                    )
        except BridgeError:
            assert may_refuse or begun != self.begun
        else:
            block.shown.append(line)

    def may_refuse(self, block: Block) -> bool:
        return self.capturing() or (block.line is not None and not block.line.held)

    @precondition(lambda self: self.live)
    @rule(which=PICK, pick=PICK, host=st.booleans())
    def use(self, which: int, pick: int, host: bool) -> None:
        """Enqueue a kernel, or a Python function."""
        self.use_on(self.block(which), pick, host=host)

    def use_on(self, block: Block, pick: int, *, host: bool = False) -> None:
        lines = [x for x in (block.line, *block.shown) if x is not None and self.usable(x)]
        lines = [x for x in lines if not (x.legacy and self.legacy_is_barred(x.stream.device))]
        if not lines:
            return
        line = lines[pick % len(lines)]
        operation = self.fake.enqueue(line.stream, host=host)
        if operation >= 0:
            block.operations.append(operation)
        else:
            block.graphs.append((line, line.captures))

    @precondition(lambda self: any(block.cpu for block in self.live))
    @rule(which=PICK, pick=PICK)
    def copy_out(self, which: int, pick: int) -> None:
        """A copy with cudaMemcpyDefault out of a NumPy block: nobody tells the bridge, which only holds the stream."""
        blocks = [block for block in self.live if block.cpu]
        self.copy_out_of(blocks[which % len(blocks)], pick)

    def copy_out_of(self, block: Block, pick: int) -> None:
        line = self.line(pick, lambda x: x.stream in block.bench.owners and not x.captured)
        if line is not None and line.held:
            block.copies.append(self.fake.enqueue(line.stream))

    # --- contents of CPU blocks: a few bytes at both ends ---

    def mark(self, block: Block) -> None:
        if block.cpu:
            ctypes.memset(block.ptr, block.pattern, EDGE)
            ctypes.memset(block.ptr + block.size - EDGE, block.pattern, EDGE)

    def check_mark(self, block: Block, *, end: bool = True) -> None:
        if block.cpu:
            expected = bytes([block.pattern]) * EDGE
            assert ctypes.string_at(block.ptr, EDGE) == expected
            assert not end or ctypes.string_at(block.ptr + block.size - EDGE, EDGE) == expected

    @rule(which=PICK, size=SIZES, off=st.sampled_from([0, 0, -64, 64]), pick=PICK, use=st.booleans())
    def resize(self, which: int, size: int, off: int, pick: int, use: bool) -> None:
        """As NumPy does, which copies on the CPU: work on the block must have ended, and what is left is freed."""
        blocks = [block for block in self.live if block.cpu]
        old = blocks[which % len(blocks)] if blocks else self.allocate(size, None, pick, cpu=True)
        if old is None:
            return
        if use:
            self.show_to(old, pick, order=bool(pick % 2))
            self.use_on(old, pick)
        new = Block(old.ptr, size + off, old.bench, True, None, shown=old.shown, pattern=old.pattern)
        # Until the call is over nobody else may use the block, and nobody can tell whether it is gone.
        self.live.remove(old)
        kept_size, _ = old.bench.live.pop(old.ptr)
        self.freed.append(old)
        new.ptr = self.call("resize", None, lambda: self.handler.realloc(old.ptr, new.size))
        if new.ptr in (0, old.ptr):
            self.freed = [each for each in self.freed if each is not old]
        if new.ptr == 0:
            self.live.append(old)
            old.bench.add(old.ptr, kept_size, None)
            self.check_mark(old)
            return
        if new.ptr == old.ptr:
            new.operations, new.copies, new.graphs = old.operations, old.copies, old.graphs
        else:
            assert all(self.fake.done(each) for each in old.operations), "copied before the device's work had ended"
            new.shown = []
        kept = Block(new.ptr, old.size, old.bench, True, None, pattern=old.pattern)
        self.check_mark(kept, end=new.size >= old.size)
        self.live.append(new)
        old.bench.add(new.ptr, new.size, None)
        if new.ptr != old.ptr:
            self.check_handed_out(new)
        self.mark(new)

    # --- a child ---

    @precondition(lambda self: self.forks == 0 and self.live)
    @rule(which=PICK, pick=PICK, uses=st.lists(st.sampled_from(TRIED), min_size=1, max_size=4))
    def fork(self, which: int, pick: int, uses: list[str]) -> None:
        """Whatever a forked child tries, it makes no driver call and changes nothing."""
        block, line = self.block(which), self.line(pick)
        assert line is not None
        self.forks += 1  # it costs as much as a hundred other steps
        self.nothing_was_broken()

        def action() -> None:
            # From here on: before the fork, the bridge's thread may look at its pools at any moment.
            self.fake.clear()
            numbers = [(bench.heap.numbers, bench.heap.live_count) for bench in self.benches]
            assert block.bench.native_process.phase() == "forked"
            for use in uses:
                attempt(use, block.bench, line.stream, block.ptr)
            assert self.fake.trace() == []
            assert [(bench.heap.numbers, bench.heap.live_count) for bench in self.benches] == numbers

        assert in_forked_child(action) == ""
        self.check_mark(block)

    # --- waiting ---

    @precondition(lambda self: self.live)
    @rule(which=PICK)
    def synchronize(self, which: int) -> None:
        block = self.block(which)
        may_refuse, begun, before = self.may_refuse(block), self.begun, list(block.operations)
        try:
            self.call("synchronize", None, lambda: block.bench.blocks.synchronize(block.ptr), block)
        except BridgeError:
            assert may_refuse or begun != self.begun
        else:
            assert all(self.fake.done(each) for each in before)

    @rule(device=st.integers(0, 1))
    def trim(self, device: int) -> None:
        self.call("trim", None, self.benches[device].heap.trim)

    # --- what holds after every step ---

    @invariant()
    def the_books_are_right(self) -> None:
        for bench in self.benches:
            reserved, used, quarantined, *_ = bench.heap.numbers
            assert bench.heap.live_count == len(bench.live)
            assert bench.heap.live_bytes == sum(size for size, _ in bench.live.values())
            assert bench.heap.live_bytes <= used and used + quarantined <= reserved

    def teardown(self) -> None:
        """All goes back: no block, no stream object and no byte is left."""
        for line in self.lines:
            if line.captured:
                line.captured = False
                self.on(line.thread, lambda line=line: self.fake.end_capture(line.stream))
            if line.needs_sign and not line.held and line.usable:
                self.hold(line)
        self.fake.finish_all()
        while self.live:
            before = len(self.live)
            self.let_go(self.live[0], 0, False)
            if len(self.live) == before:
                self.let_go(self.live[0], 1, True)
        self.fake.finish_all()
        for bench in self.benches:
            bench.owners.clear()
            self.on(0, bench.heap.trim)
            self.on(0, bench.heap.drop_unused_streams)
            assert self.on(0, bench.heap.retire), "the pool could not close"
            assert bench.reserved_bytes == 0 and bench.quarantined_bytes == 0
        self.nothing_was_broken()


def run_machine(machine: type[PoolMachine], monkeypatch: pytest.MonkeyPatch, examples: int = 1000) -> None:
    monkeypatch.setattr(messages, "warn", lambda pending: None)  # of quarantines that are full for good reasons
    monkeypatch.setattr("rmm_managed_bridge._native.pressure.collect_garbage", lambda: None)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES or examples,
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
