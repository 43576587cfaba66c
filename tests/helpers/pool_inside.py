"""The pool's machine, acting inside of driver calls: what another thread does between a look and what follows from it,
or between our event and our lock. See native/test_pool_machine_inside.py.

An action there is one of the machine's own, on the other thread, so the model has changed in the midst of the call that
it is inside of. So a rule of the model compares what the bridge owes to that call: with what was enqueued before, and
with what was freed until it came back.
"""

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from fake_cuda import GLOBAL, PER_THREAD, RELAXED, THREAD_LOCAL, Hook
from fake_cuda.pool import EVERYTHING, KIB, MIB
from helpers.pool_machine import PICK, Block, Line
from helpers.pool_memory import PoolMachine
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

CALLS = [
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuEventSynchronize",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
]
# One of them, the more often the more hangs on it; or whichever comes next.
FUNCTIONS = [*["cuEventRecord", "cuEventQuery", "cuStreamIsCapturing"] * 2, *CALLS, *[""] * 5]
MODES = [GLOBAL, THREAD_LOCAL, RELAXED]


ACTIONS: dict[str, Callable[["InsideMachine", int, int], object]] = {}
# A step stands for many choices, and Hypothesis takes longer for each of its draws than the pool does for a call. Few
# enough that it draws all numbers alike.
SEEDS = st.integers(0, (1 << 24) - 1)


class Choices(random.Random):
    """What one step does, from its seed."""

    def pick(self) -> int:
        return self.randrange(28)

    def action(self, names: list[str]) -> tuple[str, int, int]:
        return self.choice(names), self.pick(), self.pick()

    def meanwhile(self, names: list[str]) -> list[tuple[str, int, int]]:
        return [self.action(names) for _ in range(self.choice([1, 1, 2, 2, 3, 4]))]


def overlapping(names: list[str]) -> Callable[..., None]:
    """Return a rule: one of these actions, others inside of it, and then some want the memory."""

    def run(self: "InsideMachine", seed: int) -> None:
        choices = Choices(seed)
        for _ in range(3):
            self.overlap(names, choices)

    run.__name__ = "overlap_" + names[0].replace(" ", "_")
    return rule(seed=SEEDS)(run)


class InsideMachine(PoolMachine):
    """Acts inside of one call at a time, and of none that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks = {name: Hook(partial(self.strike, name)) for name in CALLS}
        self.function = ""  # that is acted in; "" for any
        self.armed: list[tuple[str, int, int]] = []
        self.skip = 0
        self.near: list[Line] = []  # most is about these, and about blocks of one size
        self.size = 256 * KIB
        self.names: list[str] = []  # of the actions that happen inside
        self.wrong: list[BaseException] = []
        # Of the call that is made by the program, and of no one that is made inside of it:
        self.thread = 0
        self.ident = 0
        self.inside = False
        self.what = ""
        self.named: Line | None = None
        self.kept: Block | None = None

    # --- calls, and what happens inside of them ---

    def on(self, thread: int, action: Callable[[], Any]) -> Any:
        """Thread 0 is this one: to change threads takes longer than most calls. Inside, it is one in no call."""
        if self.inside:
            return super().on(0 if self.thread else 1, action)
        self.thread = thread

        def run() -> Any:
            self.ident = threading.get_ident()
            self.set_hooks()
            return action()

        try:
            return super().on(thread, run) if thread else run()
        finally:
            self.nothing_went_wrong_inside()

    def call(self, what: str, line: Line | None, action: Callable[[], Any], block: Block | None = None) -> Any:
        if not self.inside:
            self.what, self.named, self.kept = what, line, block
        try:
            return super().call(what, line, action, block)
        finally:
            if not self.inside:
                self.what, self.named, self.kept = "", None, None

    def set_hooks(self) -> None:
        for name in [self.function] if self.function else CALLS:
            if self.armed:
                self.fake.on_call(name, self.hooks[name])

    def strike(self, function: str) -> None:
        if self.inside or not self.armed or threading.get_ident() != self.ident:
            return  # it is a call inside of ours, or one of the bridge's own thread for a pool of an earlier example
        if self.skip > 0:
            self.skip -= 1
            self.fake.on_call(function, self.hooks[function])
            return
        actions, self.armed = self.armed, []
        self.function = function
        self.struck += 1
        self.inside = True
        try:
            for name, first, second in actions:
                ACTIONS[name](self, first, second)
        except BaseException as error:  # which has no way through the driver
            self.wrong.append(error)
        finally:
            self.inside = False

    @invariant()
    def nothing_went_wrong_inside(self) -> None:
        if self.wrong:
            raise self.wrong.pop()

    # --- what a program may do there ---

    def usable(self, line: Line) -> bool:
        """Return False also for a thread's own stream while that thread is in a call, or waits for one."""
        return line.usable and not (self.inside and line.stream.handle == PER_THREAD)

    def may_go(self, line: Line) -> bool:
        return super().may_go(line) and not (self.inside and line is self.named)

    def may_be_captured(self, line: Line) -> bool:
        if not super().may_be_captured(line):
            return False
        if not self.inside:
            return True
        # Between a look at the legacy stream and what is done there, nothing can keep other threads from it.
        if line.stream.blocking and self.function == "cuStreamIsCapturing":
            return False
        if line is not self.named:
            return True
        # Nor between a look and the question for the id of a stream that nobody holds; and a program does not begin to
        # capture the stream that it makes wait meanwhile.
        return self.what in ("free", "expose") and (line.held or self.function in ("cuEventRecord", "cuEventQuery"))

    def block(self, pick: int) -> Block:
        blocks = [each for each in self.live if each is not self.kept]
        return blocks[pick % len(blocks)]

    def close(self) -> list[Line]:
        """The streams that most is about: that of the call, if an action is inside of one and it names one."""
        return self.near if self.named is None or self.struck % 2 else [self.named]

    def close_line(self, pick: int, want: Callable[[Line], bool] = lambda line: True) -> Line | None:
        near = [line for line in self.close() if self.usable(line) and want(line)]
        return near[pick // 4 % len(near)] if near and pick % 4 else self.line(pick // 4, want)

    def close_block(self, pick: int) -> Block | None:
        blocks = [each for each in self.live if each is not self.kept]
        near = [each for each in blocks if each.line in self.close()]
        if near and pick % 4:
            return near[-1 - pick // 4 % len(near)]
        return blocks[-1 - pick // 4 % len(blocks)] if blocks else None

    def allocate_inside(self, line: Line | None, pick: int, *, cpu: bool = False) -> Block | None:
        """Not where it would have to wait until the call that it is inside of has given memory back."""
        bench = self.benches[pick % 4 == 3 if line is None else line.stream.device]
        if (
            not self.inside
            or self.what not in ("allocate", "resize", "trim")
            or bench.reserved_bytes + self.size + MIB <= bench.limit_bytes
        ):
            return self.allocate(self.size, line, pick, cpu=cpu)
        return None

    def begin_inside(self, first: int, second: int) -> Line | None:
        line = self.close_line(first, self.may_be_captured)
        if line is None or sum(x.captured for x in self.lines) >= 2:
            return None
        self.on(line.thread, lambda: self.fake.begin_capture(line.stream, MODES[second % 3]))
        line.captured = True
        line.captures += 1
        self.begun += 1
        if self.inside and line is self.named and self.what == "free" and not line.held:
            line.needs_sign = True
        return line

    def free_in_capture(self, first: int, second: int) -> None:
        """A capture, short enough to begin and end in one call of another thread."""
        line = self.begin_inside(first, second)
        if line is None:
            return
        blocks = [each for each in self.live if each.line is line and each is not self.kept]
        if blocks:
            self.let_go(blocks[second % len(blocks)], 1, True)
        self.end_capture_of(line)

    def show_and_free_in_capture(self, first: int, second: int) -> None:
        """A block that others were shown waits for an event, and no capture records one."""
        line = self.close_line(first, self.may_be_captured)
        blocks = [each for each in self.live if line is not None and each.line is line and each is not self.kept]
        if line is None or not blocks:
            return
        block = blocks[second % len(blocks)]
        self.use_on(block, 0)
        self.show_to(block, second, order=False)
        if self.begin_inside(first, second) is line:
            self.let_go(block, 1, True)
            self.end_capture_of(line)

    def end_inside(self, first: int) -> None:
        line = self.line(first, lambda x: x.captured)
        if line is not None:
            self.end_capture_of(line)

    def free_inside(self, first: int, second: int, *, state_stream: bool) -> None:
        if (block := self.close_block(first)) is not None:
            self.let_go(block, second, state_stream)

    def work_inside(self, first: int, second: int) -> None:
        if (block := self.close_block(first)) is not None:
            self.use_on(block, second)

    def show_inside(self, first: int, second: int, *, order: bool) -> None:
        if (block := self.close_block(first)) is not None:
            self.show_to(block, second, order=order)

    def copy_inside(self, first: int, second: int, *, free: bool) -> None:
        blocks = [block for block in self.live if block.cpu and block is not self.kept]
        if blocks:
            block = blocks[-1 - first % len(blocks)]
            self.copy_out_of(block, second)
            if free:
                self.let_go(block, second, False)

    def advance_inside(self, first: int, second: int) -> None:
        if (line := self.close_line(first)) is not None:
            self.fake.advance(line.stream, 1 + second % 4)

    def holders_change(self) -> bool:
        """Return True inside of a call of this kind: two at once would be two threads with the GIL."""
        return self.inside and self.what in ("adopt", "drop")

    def adopt_inside(self, first: int) -> None:
        line = self.close_line(first, self.may_be_held)
        if line is not None and not self.holders_change():
            self.hold(line)

    def drop_inside(self, device: int) -> None:
        if not self.holders_change():
            PoolMachine.drop_unused_streams(self, device)

    def numbers(self) -> list[object]:
        """A report, which moves what lies in the fronts of lanes."""
        return [bench.heap.numbers for bench in self.benches]

    def let_go_stream(self, pick: int, want: Callable[[Line], bool] = lambda line: True) -> None:
        line = self.close_line(pick, lambda x: self.may_go(x) and want(x))
        if line is None:
            return
        line.usable = False
        if self.benches[line.stream.device].owners.pop(line.stream, None) is None:
            self.fake.destroy(line.stream)

    def let_go_idle(self, pick: int) -> None:
        """A held stream that no live block names: the bridge may let go of it at once."""
        named = {id(line) for block in self.live for line in (block.line, *block.shown) if line is not None}
        if not self.holders_change():
            self.let_go_stream(pick, lambda x: x.held and x.stream.device == 0 and id(x) not in named)
            PoolMachine.drop_unused_streams(self, 0)

    def adopt_and_free(self, first: int, second: int) -> None:
        """What was borrowed is held, and the front that takes a block then is looked into."""
        line = self.close_line(first, self.may_be_held)
        if line is None or self.holders_change():
            return
        self.hold(line)
        blocks = [each for each in self.live if each.line is line and each is not self.kept]
        if blocks:
            self.use_on(blocks[-1], 0)
            self.let_go(blocks[-1], 1, bool(second % 2))
        self.numbers()

    def new_near(self, pick: int) -> None:
        """Often with the handle of one that is gone."""
        if len(self.lines) < 16:
            self.create_stream(0, pick % 4 == 0, pick % 3 == 0)
            self.near = [self.lines[-1], *self.near[:2]]

    def come_anew(self, first: int, second: int) -> None:
        """What has ended is looked for, and then a stream comes that may get the number of one that is gone."""
        self.allocate_inside(None, second)
        if len(self.lines) < 16:
            self.create_stream(0, first % 4 == 0, first % 2 == 0 and not self.holders_change())
            line = self.lines[-1]
            self.near = [line, *self.near[:2]]
            block = self.allocate_inside(line, second)
            if block is not None:
                self.use_on(block, 0)
                if second % 2:
                    self.let_go(block, 1, True)

    def free_for_host(self, pick: int) -> None:
        blocks = [each for each in self.live if each.line is None and each is not self.kept]
        if blocks:
            self.let_go(blocks[-1 - pick % len(blocks)], pick, False)

    def resize_block(self, first: int, second: int) -> None:
        if not self.inside:
            PoolMachine.resize(self, first, self.size, 64 * (second % 3 - 1), second, bool(second % 2))

    def synchronize_block(self, pick: int) -> None:
        if self.live and not self.inside:
            PoolMachine.synchronize(self, pick)

    # --- rules: those of the other machine are actions here, by themselves or inside of one ---

    new_stream = adopt = destroy_stream = drop_unused_streams = advance = begin_capture = end_capture = None
    allocate_on_stream = allocate_for_host = hand_over = free = show = use = copy_out = resize = None
    fork = synchronize = trim = None

    @initialize(
        room=st.sampled_from([3, 4, 6, 9, EVERYTHING]),  # in blocks
        quarantine=st.sampled_from([EVERYTHING, EVERYTHING, 256 * KIB]),
        size=st.sampled_from([256 * KIB, MIB, 3 * MIB, 3 * MIB]),
        near=st.tuples(PICK, PICK, PICK),
        seed=SEEDS,
    )
    def start(self, room: int, quarantine: int, size: int, near: tuple[int, int, int], seed: int) -> None:
        self.fake.set_current(0)
        super().start((min(room * size, EVERYTHING), 4 * MIB), quarantine)
        self.size = size
        # A fault takes a few actions in turn, which come together more often where there are few others.
        choices = Choices(seed)
        self.names = choices.sample(NAMES, choices.choice([4, 8, 16, len(NAMES)]))
        borrowed = [line for line in self.lines if not line.held]
        held = [line for line in self.lines if line.stream in self.benches[0].owners]
        self.near = [borrowed[near[0] % 2], held[near[1] % 2], self.lines[near[2] % len(self.lines)]]

    @rule(seed=SEEDS)
    def act(self, seed: int) -> None:
        for name, first, second in Choices(seed).meanwhile(self.names):
            ACTIONS[name](self, first, second)

    def give(self, choices: Choices) -> None:
        """A stream uses blocks and frees some of them."""
        line, kept, freed = self.close_line(choices.pick()), choices.randrange(3), choices.randrange(3)
        blocks = [self.allocate(self.size, line, 0) for _ in range(kept + freed)]
        shown = choices.randrange(2) == 0
        for block in blocks:
            if block is not None:
                self.use_on(block, 0)
                if shown:
                    self.show_to(block, choices.pick(), order=False)
        for block in blocks[kept:]:
            if block is not None:
                self.let_go(block, 1, True)
        if line is not None:
            self.fake.advance(line.stream, choices.choice([0, 0, 1, 9, 9]))

    def give_for_host(self, choices: Choices) -> None:
        """NumPy makes blocks, copies start out of them, and some are freed."""
        for _ in range(choices.randrange(1, 4)):
            if (block := self.allocate(self.size, None, 0, cpu=True)) is not None:
                self.copy_out_of(block, choices.pick())
                if choices.randrange(2):
                    self.let_go(block, 0, False)

    def overlap(self, names: list[str], choices: Choices) -> None:
        for give in choices.choice([[], [self.give], [self.give], [self.give, self.give], [self.give_for_host]]):
            give(choices)
        self.function = choices.choice(FUNCTIONS)
        self.skip = choices.randrange(choices.randrange(1, 4 if self.function else 10))
        self.armed = choices.meanwhile(self.names)
        name, first, second = choices.action(names)
        ACTIONS[name](self, first, second)
        if choices.randrange(2) and (line := self.close_line(choices.pick())) is not None:
            self.fake.advance(line.stream, choices.randrange(1, 5))
        for _ in range(choices.randrange(4)):
            line = self.close_line(choices.pick()) if choices.randrange(2) else None
            self.allocate(self.size, line, 0, cpu=line is None and choices.randrange(2) == 0)
        self.armed = []

    overlap_a_free = overlapping(["free on a stream", "use and free", "free", "free for the host"])
    overlap_an_allocation = overlapping(["allocate", "allocate for the host"])
    overlap_a_trim = overlapping(["trim"])
    overlap_others = overlapping(["show", "order", "synchronize", "resize", "adopt", "drop streams", "let a stream go"])

    def teardown(self) -> None:
        self.armed = []
        super().teardown()


ACTIONS |= {
    "work": InsideMachine.work_inside,
    "free on a stream": lambda self, first, second: self.free_inside(first, second, state_stream=True),
    "free": lambda self, first, second: self.free_inside(first, second, state_stream=False),
    "use and free": lambda self, first, second: (
        self.work_inside(first, second),
        self.free_inside(first, second, state_stream=True),
    ),
    "allocate": lambda self, first, second: self.allocate_inside(self.close_line(first), second),
    "allocate for the host": lambda self, first, second: self.allocate_inside(None, second, cpu=bool(first % 2)),
    "show": lambda self, first, second: self.show_inside(first, second, order=False),
    "order": lambda self, first, second: self.show_inside(first, second, order=True),
    "copy": lambda self, first, second: self.copy_inside(first, second, free=False),
    "copy and free": lambda self, first, second: self.copy_inside(first, second, free=True),
    "free in a capture": InsideMachine.free_in_capture,
    "use, then free in a capture": lambda self, first, second: (
        self.work_inside(first, second),
        self.free_in_capture(first, second),
    ),
    "use, show, then free in a capture": InsideMachine.show_and_free_in_capture,
    "come anew": InsideMachine.come_anew,
    "let an idle stream go, and drop it": lambda self, first, second: self.let_go_idle(first),
    "adopt, use and free": InsideMachine.adopt_and_free,
    "begin a capture": InsideMachine.begin_inside,
    "synchronize": lambda self, first, second: self.synchronize_block(first),
    "resize": lambda self, first, second: self.resize_block(first, second),
    "free for the host": lambda self, first, second: self.free_for_host(first),
    "new stream": lambda self, first, second: self.new_near(first),
    "end a capture": lambda self, first, second: self.end_inside(first),
    "adopt": lambda self, first, second: self.adopt_inside(first),
    "let a stream go": lambda self, first, second: self.let_go_stream(first),
    "drop streams": lambda self, first, second: self.drop_inside(first // 4 % 2 if first % 4 == 0 else 0),
    "trim": lambda self, first, second: PoolMachine.trim(self, first // 4 % 2 if first % 4 == 0 else 0),
    "report": lambda self, first, second: self.numbers(),
}
NAMES = [
    *ACTIONS,
    *["use and free", "allocate"] * 3,
    "begin a capture",
    "use, then free in a capture",
    *["come anew"] * 2,
    *["use, show, then free in a capture"] * 3,
]
