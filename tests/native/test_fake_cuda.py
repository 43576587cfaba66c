"""The fake driver behaves as docs/design/measured.md says: it loses captures where the real one does."""

import ctypes
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.fake_cuda import GLOBAL, LEGACY, PER_THREAD, RELAXED, THREAD_LOCAL, FakeCuda, Stream

import rmm_managed_bridge

pytestmark = pytest.mark.fake_driver

MODES = [GLOBAL, THREAD_LOCAL, RELAXED]
IMPLICIT, CAPTURED_EVENT, NOT_READY, INVALID_CONTEXT, INVALID_HANDLE = 906, 907, 600, 201, 400


class Driver:
    """The exported functions, as a program calls them."""

    def __init__(self, fake: FakeCuda) -> None:
        self.lib = fake.lib

    def event(self) -> ctypes.c_void_p:
        """Return a new event."""
        event = ctypes.c_void_p()
        assert self.lib.cuEventCreate(ctypes.byref(event), 0) == 0
        return event

    def record(self, event: ctypes.c_void_p, handle: int) -> int:
        """Record an event."""
        return int(self.lib.cuEventRecord(event, ctypes.c_void_p(handle)))

    def wait(self, handle: int, event: ctypes.c_void_p) -> int:
        """Make a stream wait."""
        return int(self.lib.cuStreamWaitEvent(ctypes.c_void_p(handle), event, 0))

    def id_of(self, handle: int) -> tuple[int, int]:
        """Return result and id."""
        out = ctypes.c_ulonglong()
        return int(self.lib.cuStreamGetId(ctypes.c_void_p(handle), ctypes.byref(out))), out.value

    def status(self, handle: int) -> tuple[int, int]:
        """Return result and capture status."""
        out = ctypes.c_int()
        return int(self.lib.cuStreamIsCapturing(ctypes.c_void_p(handle), ctypes.byref(out))), out.value

    def exchange(self, mode: int) -> int:
        """Set the thread's mode and return the one before."""
        out = ctypes.c_int(mode)
        assert self.lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(out)) == 0
        return out.value


@pytest.fixture
def driver(fake: FakeCuda) -> Driver:
    """The fake as a program sees it."""
    return Driver(fake)


def survives(fake: FakeCuda, stream: Stream, mode: int, action: Callable[[], object]) -> bool:
    """Return True if a capture of the stream survives `action`."""
    fake.begin_capture(stream, mode)
    action()
    survived = fake.end_capture(stream)
    fake.clear()
    return survived


def test_it_exports_all_that_the_bridge_calls(fake: FakeCuda) -> None:
    header = Path(rmm_managed_bridge.__file__).parent / "_native" / "driver.hpp"
    if not header.exists():
        pytest.skip("an installed package has no headers")
    symbols = re.findall(r'^  X\(\w+, \w+, "(\w+)"\)', header.read_text(), re.MULTILINE)
    assert len(symbols) == 23
    assert [name for name in symbols if not hasattr(fake.lib, name)] == []


def test_work_ends_when_told_and_in_order(fake: FakeCuda, driver: Driver) -> None:
    a, b = fake.stream(), fake.stream()
    first, second = fake.enqueue(a), fake.enqueue(a)
    event = driver.event()
    assert driver.record(event, a.handle) == 0
    assert driver.wait(b.handle, event) == 0
    third = fake.enqueue(b)
    assert fake.advance(b) == 0, "its wait is not over"
    assert fake.ordered(second, b) and not fake.ordered(third, a)
    assert driver.lib.cuEventQuery(event) == NOT_READY
    assert fake.advance(a, 5) == 2 and fake.done(first)
    assert driver.lib.cuEventQuery(event) == 0
    assert fake.advance(b) == 1 and fake.done(third)


def test_a_wait_on_the_cpu_ends_what_it_waits_for_and_no_more(fake: FakeCuda, driver: Driver) -> None:
    a, b = fake.stream(), fake.stream()
    first, other = fake.enqueue(a), fake.enqueue(b)
    event = driver.event()
    driver.record(event, a.handle)
    later = fake.enqueue(a)
    assert driver.lib.cuEventSynchronize(event) == 0
    assert fake.done(first) and not fake.done(later) and not fake.done(other)


def test_the_legacy_stream_and_blocking_streams_order_each_other(fake: FakeCuda) -> None:
    legacy, blocking, free = fake.ambient(LEGACY), fake.stream(blocking=True), fake.stream()
    first, unrelated = fake.enqueue(blocking), fake.enqueue(free)
    second = fake.enqueue(legacy)
    assert fake.ordered(first, legacy) and not fake.ordered(unrelated, legacy)
    assert fake.ordered(second, blocking) and not fake.ordered(second, free)
    assert fake.ordered(second, fake.ambient(PER_THREAD))


def test_handles_come_back_and_ids_do_not(fake: FakeCuda, driver: Driver) -> None:
    old = fake.stream()
    fake.destroy(old)
    assert driver.id_of(old.handle)[0] == INVALID_HANDLE
    assert driver.status(old.handle)[0] == INVALID_HANDLE
    assert len(fake.violations()) == 2, "the real driver crashes"
    fake.clear()
    new = fake.stream()
    assert new.handle == old.handle and driver.id_of(new.handle) == (0, new.id) and new.id != old.id


def test_per_thread_streams_have_one_handle_and_an_id_for_each_thread(driver: Driver) -> None:
    ids = [driver.id_of(PER_THREAD)[1]]

    def work() -> None:
        driver.lib.fake_set_current(0)
        ids.append(driver.id_of(PER_THREAD)[1])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(set(ids)) == 2


def test_a_thread_without_a_context_can_do_little(fake: FakeCuda, driver: Driver) -> None:
    stream, event = fake.stream(), driver.event()
    fake.set_current(None)
    assert driver.lib.cuEventCreate(ctypes.byref(ctypes.c_void_p()), 0) == INVALID_CONTEXT
    assert driver.record(event, LEGACY) == INVALID_CONTEXT
    assert driver.record(event, stream.handle) == 0 and driver.id_of(stream.handle) == (0, stream.id)


@pytest.mark.parametrize("same_thread", [True, False])
@pytest.mark.parametrize("relaxed_thread", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_event_queries_and_waits_lose_captures(
    fake: FakeCuda, driver: Driver, mode: int, relaxed_thread: bool, same_thread: bool
) -> None:
    captured, other = fake.stream(), fake.stream()
    event = driver.event()
    driver.record(event, other.handle)
    for call in (driver.lib.cuEventQuery, driver.lib.cuEventSynchronize):

        def body(call: Callable[[ctypes.c_void_p], int] = call) -> None:
            before = driver.exchange(RELAXED if relaxed_thread else GLOBAL)
            call(event)
            driver.exchange(before)

        def on_a_thread(body: Callable[[], None] = body) -> None:
            thread = threading.Thread(target=body)
            thread.start()
            thread.join()

        harmless = relaxed_thread or mode == RELAXED or (mode == THREAD_LOCAL and not same_thread)
        assert survives(fake, captured, mode, body if same_thread else on_a_thread) == harmless


@pytest.mark.parametrize("mode", MODES)
def test_what_loses_a_capture_in_every_mode(fake: FakeCuda, driver: Driver, mode: int) -> None:
    free, blocking, other = fake.stream(), fake.stream(blocking=True), fake.stream()
    event = driver.event()
    driver.exchange(RELAXED)

    def record_and(then: Callable[[], object]) -> Callable[[], object]:
        return lambda: (driver.record(event, free.handle), then())

    assert survives(fake, free, mode, record_and(lambda: None))
    assert not survives(fake, free, mode, record_and(lambda: driver.lib.cuEventQuery(event)))
    assert not survives(fake, free, mode, record_and(lambda: driver.wait(other.handle, event))), "it joins"
    assert not survives(fake, free, mode, driver.lib.cuCtxSynchronize)
    assert not survives(fake, blocking, mode, lambda: driver.id_of(LEGACY))
    assert survives(fake, free, mode, lambda: driver.id_of(LEGACY))
    assert not survives(fake, blocking, mode, lambda: driver.record(driver.event(), LEGACY))
    assert survives(fake, free, mode, lambda: driver.record(driver.event(), LEGACY))
    outside = driver.event()
    driver.record(outside, other.handle)
    assert not survives(fake, free, mode, lambda: driver.wait(free.handle, outside))
    driver.exchange(GLOBAL)


def test_looking_at_the_legacy_stream_is_harmless(fake: FakeCuda, driver: Driver) -> None:
    free, blocking = fake.stream(), fake.stream(blocking=True)
    assert survives(fake, blocking, GLOBAL, lambda: driver.status(LEGACY))
    fake.begin_capture(blocking)
    assert driver.status(LEGACY)[0] == IMPLICIT and driver.status(blocking.handle) == (0, 1)
    assert driver.status(free.handle) == (0, 0) and driver.id_of(free.handle) == (0, free.id)
    assert driver.record(driver.event(), free.handle) == 0
    assert fake.end_capture(blocking)


def test_faults_and_hooks_apply_once(fake: FakeCuda, driver: Driver) -> None:
    ran: list[int] = []
    fake.fail("cuEventRecord", skip=1, result=999)
    fake.on_call("cuEventRecord", lambda: ran.append(1))
    event, stream = driver.event(), fake.stream()
    assert [driver.record(event, stream.handle) for _ in range(3)] == [0, 999, 0]
    assert ran == [1] and fake.calls("cuEventRecord") == 3
