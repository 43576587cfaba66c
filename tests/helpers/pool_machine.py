"""What the state machine over the pool stands on: two devices, two threads, and streams of all kinds; see
native/test_pool_machine.py.
"""

import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import fake_cuda
from fake_cuda import GLOBAL, LEGACY, PER_THREAD, RELAXED, THREAD_LOCAL, FakeCuda, Stream
from fake_cuda.pool import Bench, Owner
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

PICK = st.integers(0, 27)


_patterns = itertools.cycle(range(1, 256))


@dataclass(eq=False)
class Line:
    """A stream as the program sees it."""

    stream: Stream
    held: bool  # by the bridge, or for ever there
    thread: int = 0  # where its handle means it
    usable: bool = True
    captured: bool = False
    captures: int = 0  # how many it has had, the one that goes on among them
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
    graphs: list[tuple[Line, int]] = field(default_factory=list)  # and which of the line's captures used the block
    pattern: int = field(default_factory=lambda: next(_patterns))  # what a CPU block is filled with

    def in_capture(self) -> bool:
        """Return True while a capture that has used the block goes on; a later one of that stream does not count."""
        return any(line.captured and line.captures == number for line, number in self.graphs)

    def overlaps(self, other: "Block") -> bool:
        return self.ptr < other.ptr + other.size and other.ptr < self.ptr + self.size


class StreamMachine(RuleBasedStateMachine):
    """The streams of a program, and its device."""

    threads = (ThreadPoolExecutor(1), ThreadPoolExecutor(1))

    def __init__(self) -> None:
        super().__init__()
        self.fake: FakeCuda = fake_cuda.load()
        self.fake.reset()
        self.lines: list[Line] = []
        self.live: list[Block] = []
        self.freed: list[Block] = []
        self.benches: list[Bench] = []
        self.begun = 0  # captures, so far

    def start_streams(self) -> None:
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

    def call(self, what: str, line: Line | None, action: Callable[[], Any], block: "Block | None" = None) -> Any:
        """Run a call of the bridge that names a stream, on a thread where its handle means it.

        `what` it is and the live `block` that it names are for a machine that acts inside of it.
        """
        return self.on(0 if line is None else line.thread, action)

    def usable(self, line: Line) -> bool:
        return line.usable

    def line(self, pick: int, want: Callable[[Line], bool] = lambda line: True) -> Line | None:
        found = [line for line in self.lines if self.usable(line) and want(line)]
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
        if self.call("adopt", line, lambda: bench.heap.hold(line.stream.handle, owner)):
            line.held, line.needs_sign = True, False

    @rule(pick=PICK)
    def adopt(self, pick: int) -> None:
        line = self.line(pick, self.may_be_held)
        if line is not None:
            self.hold(line)

    def may_be_held(self, line: Line) -> bool:
        return not line.held and not line.captured and line.stream not in self.benches[line.stream.device].owners

    @rule(pick=PICK)
    def destroy_stream(self, pick: int) -> None:
        """A borrowed stream goes at once; of a held one the program only drops its object."""
        line = self.line(pick, self.may_go)
        if line is None:
            return
        line.usable = False
        if self.benches[line.stream.device].owners.pop(line.stream, None) is None:
            self.fake.destroy(line.stream)

    def may_go(self, line: Line) -> bool:
        return line.stream.handle not in (LEGACY, PER_THREAD) and not line.captured and not line.needs_sign

    @rule(device=st.integers(0, 1))
    def drop_unused_streams(self, device: int) -> None:
        self.call("drop", None, self.benches[device].heap.drop_unused_streams)

    # --- the device ---

    @rule(pick=PICK, count=st.integers(1, 4))
    def advance(self, pick: int, count: int) -> None:
        self.fake.advance(self.lines[pick % len(self.lines)].stream, count)

    @rule(pick=PICK, mode=st.sampled_from([GLOBAL, THREAD_LOCAL, RELAXED]))
    def begin_capture(self, pick: int, mode: int) -> None:
        line = self.line(pick, self.may_be_captured)
        if line is not None and sum(x.captured for x in self.lines) < 2:
            self.on(line.thread, lambda: self.fake.begin_capture(line.stream, mode))
            line.captured = True
            line.captures += 1
            self.begun += 1

    def may_be_captured(self, line: Line) -> bool:
        return not line.legacy and not line.captured

    @rule(pick=PICK)
    def end_capture(self, pick: int) -> None:
        line = self.line(pick, lambda x: x.captured)
        if line is not None:
            self.end_capture_of(line)

    def end_capture_of(self, line: Line) -> None:
        line.captured = False
        assert self.on(line.thread, lambda: self.fake.end_capture(line.stream)), "a capture was lost"

    @invariant()
    def nothing_was_broken(self) -> None:
        assert (said := self.fake.violations()) == [], said
