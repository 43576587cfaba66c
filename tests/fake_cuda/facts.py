"""What a CUDA driver does that the bridge relies on and no manual promises (docs/design/measured.md), as one table.

The fake driver and the real one are both held to it: tests/native/test_fake_cuda.py, tests/gpu/test_driver.py.
"""

import itertools
import time
from collections.abc import Callable

from fake_cuda import GLOBAL, LEGACY, PER_THREAD, RELAXED, THREAD_LOCAL
from fake_cuda.calls import (
    ACTIVE,
    CAPTURED_EVENT,
    IMPLICIT,
    INVALIDATED,
    ISOLATION,
    LOST,
    NONE,
    NOT_READY,
    OK,
    UNJOINED,
    UNMATCHED,
    UNSUPPORTED,
    must,
)
from fake_cuda.cases import ERROR, SIZE, Act, Case, Fact, Scene, on_a_thread

CU_STREAM_LEGACY = 1  # the same stream as handle 0
SAME = (False,)  # only on the thread that began the capture


def unless_unsafe(case: Case) -> bool:
    """Whether a capture survives a call that waits, allocates or frees elsewhere: CUDA's rule for thread modes."""
    if RELAXED in (case.mode, case.thread_mode):
        return True
    return case.elsewhere and THREAD_LOCAL in (case.mode, case.thread_mode)


def or_unsupported(case: Case) -> int:
    return OK if unless_unsafe(case) else UNSUPPORTED


def unless_blocking(case: Case) -> bool:
    return not case.blocking


def or_implicit(case: Case) -> int:
    return IMPLICIT if case.blocking else OK


def record_look_destroy(s: Scene) -> object:
    """What the bridge does at a free on a stream that may be captured."""
    event = must(s.driver.event())
    return s.driver.record(event, s.captured), s.driver.status(s.captured), s.driver.event_destroy(event)


def record_and(then: Act) -> Act:
    return lambda s: (s.driver.record(s.event, s.captured), then(s))


def make_and_destroy(s: Scene) -> object:
    result, event = s.driver.event()
    return result, s.driver.event_destroy(event)


def join(s: Scene) -> object:
    """Let another stream join the capture."""
    return s.driver.record(s.event, s.captured), s.driver.wait(s.other, s.event)


def join_and(then: Act) -> Act:
    return lambda s: (join(s), then(s))


def lose_by_the_context(s: Scene) -> int:
    return s.driver.context_synchronize()


def lose_by_its_event(s: Scene) -> int:
    must(s.driver.record(s.event, s.captured))
    return s.driver.query(s.event)


def lose_by_another_event(s: Scene) -> int:
    return s.driver.query(s.outside)


def in_capture() -> list[Fact]:
    """What is done while a stream is captured, and whether the capture lives through it."""
    known, free, active = (OK, True), (OK, NONE), (OK, ACTIVE)
    unknown = (UNSUPPORTED, False)
    relaxed = (RELAXED,)  # the thread mode in which least is forbidden
    return [
        Fact("id of the captured stream", lambda s: s.id_of(s.captured), unknown, False),
        Fact("status of the captured stream", lambda s: s.driver.status(s.captured), active),
        Fact("id of another stream", lambda s: s.id_of(s.other), known),
        Fact("status of another stream", lambda s: s.driver.status(s.other), free),
        Fact("id of another blocking stream", lambda s: s.id_of(s.neighbour), known),
        Fact("status of another blocking stream", lambda s: s.driver.status(s.neighbour), free),
        Fact("id of the per-thread stream", lambda s: s.driver.id_of(PER_THREAD)[0], OK),
        Fact("status of the per-thread stream", lambda s: s.driver.status(PER_THREAD), free),
        Fact("status of the legacy stream", lambda s: s.driver.status(LEGACY)[0], or_implicit),
        Fact("id of the legacy stream", lambda s: s.driver.id_of(LEGACY)[0], or_implicit, unless_blocking),
        Fact("id of CU_STREAM_LEGACY", lambda s: s.driver.id_of(CU_STREAM_LEGACY)[0], or_implicit, unless_blocking),
        Fact("an event on the legacy stream", lambda s: s.driver.record(s.event, LEGACY), or_implicit, unless_blocking),
        Fact("a wait on the legacy stream", lambda s: s.driver.wait(LEGACY, s.outside), or_implicit, unless_blocking),
        Fact(
            "a wait for the legacy stream",
            lambda s: s.driver.synchronize(LEGACY),
            or_implicit,
            unless_blocking,
            thread_modes=relaxed,
        ),
        Fact("an event made and destroyed", make_and_destroy, (OK, OK)),
        Fact("an event on another stream", lambda s: s.driver.record(s.event, s.other), OK),
        Fact("an event on another blocking stream", lambda s: s.driver.record(s.event, s.neighbour), OK),
        Fact("another stream waits for another's event", lambda s: s.driver.wait(s.neighbour, s.outside), OK),
        Fact("a pointer's attribute", lambda s: s.driver.is_managed(s.memory[0]), (OK, 1)),
        Fact("a prefetch on another stream", lambda s: s.driver.prefetch(s.memory[0], SIZE, s.other), OK),
        Fact("advice", lambda s: s.driver.advise(s.memory[0], SIZE), OK, thread_modes=relaxed),
        Fact("an event on the captured stream, destroyed", record_look_destroy, (OK, active, OK)),
        Fact("a query of its event", record_and(lambda s: s.driver.query(s.event)), (OK, CAPTURED_EVENT), False),
        Fact(
            "a CPU wait for its event",
            record_and(lambda s: s.driver.event_synchronize(s.event)),
            (OK, CAPTURED_EVENT),
            False,
        ),
        Fact("a wait for the captured stream", lambda s: s.driver.synchronize(s.captured), UNSUPPORTED, False),
        Fact("it waits for an event from outside", lambda s: s.driver.wait(s.captured, s.outside), ISOLATION, False),
        Fact("a synchronisation of the context", lose_by_the_context, UNSUPPORTED, False),
        Fact("an event of the context", lambda s: s.driver.context_record(s.event), UNSUPPORTED, False),
        Fact("another stream joins it", join_and(lambda s: s.driver.status(s.other)), ((OK, OK), active)),
        Fact(
            "work on another stream that joined it",
            join_and(lambda s: s.driver.enqueue(s.other)),
            ((OK, OK), OK),
            False,
            end=UNJOINED,
        ),
        Fact("id of a stream that joined it", join_and(lambda s: s.id_of(s.other)), ((OK, OK), unknown), False),
        Fact(
            "the end of a stream that joined it",
            join_and(lambda s: s.driver.end_capture(s.other)),
            ((OK, OK), UNMATCHED),
            False,
            elsewhere=SAME,
        ),
    ]


def unsafe() -> list[Fact]:
    """What loses captures unless the thread is in a mode that lets it."""
    calls: dict[str, Act] = {
        "a query of another's event": lambda s: s.driver.query(s.outside),
        "a CPU wait for another's event": lambda s: s.driver.event_synchronize(s.outside),
        "a wait for another stream": lambda s: s.driver.synchronize(s.other),
        "managed memory allocated": Scene.allocate,
        "managed memory freed": Scene.free,
        "a graph made executable": lambda s: s.driver.instantiate_a_graph(),
    }
    modes = (GLOBAL, THREAD_LOCAL, RELAXED)
    return [
        Fact(name, call, or_unsupported, unless_unsafe, blocking=(False,), thread_modes=modes)
        for name, call in calls.items()
    ]


def when_lost() -> list[Fact]:
    """What is seen of a capture that is lost and not ended yet."""
    ways: dict[str, tuple[Callable[[Scene], int], int, tuple[int, ...], int]] = {
        "lost by the context": (lose_by_the_context, UNSUPPORTED, (GLOBAL, THREAD_LOCAL, RELAXED), RELAXED),
        "lost by its event": (lose_by_its_event, CAPTURED_EVENT, (GLOBAL, THREAD_LOCAL, RELAXED), RELAXED),
        "lost by another's event": (lose_by_another_event, UNSUPPORTED, (GLOBAL,), GLOBAL),
    }
    looks: dict[str, tuple[Act, object]] = {
        "status": (lambda s: s.driver.status(s.captured), (OK, LOST)),
        "id": (lambda s: s.id_of(s.captured), (UNSUPPORTED, False)),
        "event on it": (lambda s: s.driver.record(s.event, s.captured), INVALIDATED),
        "id of another stream": (lambda s: s.id_of(s.other), (OK, True)),
        "status of another stream": (lambda s: s.driver.status(s.other), (OK, NONE)),
        "status of the legacy stream": (lambda s: s.driver.status(LEGACY)[0], or_implicit),
        "id of the legacy stream": (lambda s: s.driver.id_of(LEGACY)[0], or_implicit),
    }

    def fact(way: str, what: str) -> Fact:
        lose, result, modes, thread_mode = ways[way]
        look, seen = looks[what]
        return Fact(
            f"{way}: {what}",
            lambda s: (lose(s), look(s)),
            lambda case: (result, seen(case) if callable(seen) else seen),
            False,
            modes=modes,
            thread_modes=(thread_mode,),
        )

    return [fact(way, what) for way, what in itertools.product(ways, looks)]


def held(stream: Callable[[Scene], int], then: Callable[[Scene], object]) -> Act:
    """Record `s.event` behind work on a stream: what a query says before that has ended, and a wait after."""

    def act(s: Scene) -> object:
        let_go = s.driver.hold(stream(s))
        try:
            then(s)
            time.sleep(0.05)  # an event behind nothing would be ready by now
            early = s.driver.query(s.event)
        finally:
            let_go()
        return early, s.driver.event_synchronize(s.event)

    return act


def wait_and_record(s: Scene) -> None:
    must(s.driver.record(s.outside, s.other))
    must(s.driver.wait(s.neighbour, s.outside))
    must(s.driver.record(s.event, s.neighbour))


def handles_and_ids(s: Scene) -> object:
    """Destroy a stream and make another, which may get its handle, but not its id."""
    gone = s.driver.stream(blocking=False)
    before = s.driver.id_of(gone)
    must(s.driver.stream_destroy(gone))
    after = s.driver.id_of(s.stream(False))
    return before[0], after[0], before[1] != after[1]


def ids_by_thread(handle: int) -> Act:
    """Return results, whether the id stays on a thread, and whether it is the same on another."""

    def act(s: Scene) -> object:
        here, again = s.driver.id_of(handle), s.driver.id_of(handle)
        there = on_a_thread(s.driver, lambda: s.driver.id_of(handle))
        return here[0], there[0], here[1] == again[1], here[1] == there[1]

    return act


def no_context(call: Act) -> Act:
    return lambda s: on_a_thread(s.driver, lambda: call(s), context=False)


def without_capture() -> list[Fact]:
    """Order, ids and contexts, with no capture about.

    Not what becomes of a destroyed stream's handle: each call crashes the real driver's process sooner or later.
    """
    facts: dict[str, tuple[Act, object]] = {
        "an event comes after its stream's work": (
            held(lambda s: s.other, lambda s: s.driver.record(s.event, s.other)),
            (NOT_READY, OK),
        ),
        "a stream that waits comes after the event": (held(lambda s: s.other, wait_and_record), (NOT_READY, OK)),
        "the legacy stream comes after blocking ones": (
            held(lambda s: s.neighbour, lambda s: s.driver.record(s.event, LEGACY)),
            (NOT_READY, OK),
        ),
        "blocking streams come after the legacy one": (
            held(lambda s: LEGACY, lambda s: s.driver.record(s.event, s.neighbour)),
            (NOT_READY, OK),
        ),
        "the per-thread stream comes after the legacy one": (
            held(lambda s: LEGACY, lambda s: s.driver.record(s.event, PER_THREAD)),
            (NOT_READY, OK),
        ),
        "an event of the context comes after a non-blocking stream": (
            held(lambda s: s.other, lambda s: s.driver.context_record(s.event)),
            (NOT_READY, OK),
        ),
        "an id never comes back": (handles_and_ids, (OK, OK, True)),
        "the per-thread stream has an id for each thread": (ids_by_thread(PER_THREAD), (OK, OK, True, False)),
        "the legacy stream has one id": (ids_by_thread(LEGACY), (OK, OK, True, True)),
        "a new thread is in global mode": (lambda s: on_a_thread(s.driver, lambda: s.driver.exchange(RELAXED)), GLOBAL),
        "no context: an event is not made": (no_context(lambda s: s.driver.event()[0]), ERROR),
        "no context: an event on the legacy stream": (no_context(lambda s: s.driver.record(s.event, LEGACY)), ERROR),
        "no context: an event on a stream": (no_context(lambda s: s.driver.record(s.event, s.other)), OK),
        "no context: id of a stream": (no_context(lambda s: s.id_of(s.other)), (OK, True)),
        "no context: id of the per-thread stream": (no_context(lambda s: s.driver.id_of(PER_THREAD)[0]), ERROR),
    }
    return [Fact(name, act, seen, captures=False) for name, (act, seen) in facts.items()]


FACTS = [*in_capture(), *unsafe(), *when_lost(), *without_capture()]
