"""How a fact about a CUDA driver is tried: what it acts on, in which circumstances, and what is seen of it."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import ANY

from fake_cuda import GLOBAL, RELAXED, THREAD_LOCAL
from fake_cuda.calls import INVALIDATED, LOST, NONE, OK, Driver, must

SIZE = 64 << 10
MODES = {GLOBAL: "global", THREAD_LOCAL: "thread-local", RELAXED: "relaxed"}


class _Error:
    """Equal to every result but success."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other != OK

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "an error"


ERROR = _Error()


class Scene:
    """What a fact acts on, made before the capture begins: streams, events and memory, all gone when `end` closes."""

    def __init__(self, driver: Driver, blocking: bool, end: ExitStack) -> None:
        self.driver, self.end = driver, end
        self.captured = self.stream(blocking)
        self.other = self.stream(False)
        self.neighbour = self.stream(True)  # another one that takes part in the legacy stream's order
        self.streams = (self.captured, self.other, self.neighbour)
        self.ids = {stream: must(driver.id_of(stream)) for stream in self.streams}
        self.event, self.outside = self.new_event(), self.new_event()
        must(driver.record(self.outside, self.other))
        must(driver.event_synchronize(self.outside))
        self.memory = [must(driver.allocate(SIZE))]
        self.end.callback(lambda: [must(driver.free(ptr)) for ptr in self.memory])

    def stream(self, blocking: bool) -> int:
        stream = self.driver.stream(blocking=blocking)
        self.end.callback(lambda: must(self.driver.stream_destroy(stream)))
        return stream

    def new_event(self) -> int:
        event = must(self.driver.event())
        self.end.callback(lambda: must(self.driver.event_destroy(event)))
        return int(event)

    def id_of(self, stream: int) -> tuple[int, bool]:
        """Return result, and whether the id is the one that the stream had before the capture."""
        result, number = self.driver.id_of(stream)
        return result, number == self.ids[stream]

    def allocate(self) -> int:
        result, ptr = self.driver.allocate(SIZE)
        if result == OK:
            self.memory.append(ptr)
        return result

    def free(self) -> int:
        result = self.driver.free(self.memory[-1])
        if result == OK:
            self.memory.pop()
        return result


Act = Callable[[Scene], object]


@dataclass(frozen=True)
class Fact:
    """One thing that is done while a stream is captured. The later fields are the circumstances it is tried in."""

    name: str
    act: Act  # returns what the driver answered
    seen: object  # the answer expected, or a function of the case that returns it
    survives: bool | Callable[["Case"], bool] = True
    end: int = INVALIDATED  # what the end of a capture answers that does not survive
    blocking: tuple[bool, ...] = (False, True)
    modes: tuple[int, ...] = (GLOBAL, THREAD_LOCAL, RELAXED)
    elsewhere: tuple[bool, ...] = (False, True)
    thread_modes: tuple[int, ...] = (GLOBAL, RELAXED)
    captures: bool = True


class Observed(NamedTuple):
    """What happened. Each answer begins with the driver's result."""

    seen: object
    before_end: object = ANY  # status of the captured stream, to the thread that began the capture; id if it is lost
    end: object = OK
    afterwards: object = (NONE, NONE, NONE)  # capture status of all streams


@dataclass(frozen=True)
class Case:
    """A fact in certain circumstances."""

    fact: Fact
    blocking: bool = False
    mode: int = RELAXED
    elsewhere: bool = False
    thread_mode: int = GLOBAL

    def __str__(self) -> str:
        if not self.fact.captures:
            return "no capture"
        kind, where = "blocking" if self.blocking else "non-blocking", "other" if self.elsewhere else "same"
        return f"{kind} stream, {MODES[self.mode]} capture, {where} thread in {MODES[self.thread_mode]} mode"

    @property
    def survives(self) -> bool:
        rule = self.fact.survives
        return rule(self) if callable(rule) else rule

    @property
    def expected(self) -> Observed:
        seen = self.fact.seen(self) if callable(self.fact.seen) else self.fact.seen
        return Observed(seen, end=OK if self.survives else self.fact.end)


def cases_of(fact: Fact) -> list[Case]:
    if not fact.captures:
        return [Case(fact)]
    circumstances = itertools.product(fact.blocking, fact.modes, fact.elsewhere, fact.thread_modes)
    return [Case(fact, *each) for each in circumstances]


def try_out(driver: Driver, fact: Fact) -> Iterator[tuple[Case, object]]:
    """Try a fact in all its circumstances: what goes wrong in one of them hides none of the others."""
    for case in cases_of(fact):
        try:
            yield case, observe(driver, case)
        except AssertionError as error:  # of `must`
            yield case, error


def summary(tried: Iterable[tuple[Case, object]]) -> str:
    """Say what was seen, and in which circumstances."""
    groups: dict[str, list[str]] = {}
    for case, observed in tried:
        groups.setdefault(repr(observed), []).append(f"    {case}, expected {case.expected}")
    return "\n".join(line for observed, where in groups.items() for line in (observed, *where))


def observe(driver: Driver, case: Case) -> Observed:
    """Do what the case says and return what was seen. The capture is ended, whatever happens."""
    act = case.fact.act

    def in_mode() -> object:
        before = driver.exchange(case.thread_mode)
        try:
            return act(scene)
        finally:
            driver.exchange(before)

    with driver.current(), ExitStack() as stack:
        scene = Scene(driver, case.blocking, stack)
        if not case.fact.captures:
            return Observed(in_mode(), before_end=None)
        must(driver.begin_capture(scene.captured, case.mode))
        try:
            seen = on_a_thread(driver, in_mode) if case.elsewhere else in_mode()
            status = driver.status(scene.captured)
            # What the id of a captured stream does is a fact of its own, not to be mixed into all the others.
            before_end = status, scene.id_of(scene.captured) if status == (OK, LOST) else None
        finally:
            # One that is left fails everything in the process from here on.
            end = driver.end_capture(scene.captured)
            afterwards = tuple(driver.status(stream)[1] for stream in scene.streams)
            for stream, status in zip(scene.streams, afterwards, strict=True):
                if status != NONE:
                    driver.end_capture(stream)
        return Observed(seen, before_end, end, afterwards)


def on_a_thread(driver: Driver, function: Callable[[], Any], *, context: bool = True) -> Any:
    """Run a function on a new thread, with the context current or with none."""

    def work() -> Any:
        if not context:
            return function()
        with driver.current():
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
