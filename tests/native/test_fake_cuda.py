"""The fake driver behaves as docs/design/measured.md says: it loses captures where the real one does."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cuda import LEGACY, PER_THREAD, FakeCuda, build
from fake_cuda.calls import INVALID_HANDLE, NOT_READY, UNJOINED, Driver, must
from fake_cuda.cases import Fact, summary, try_out
from fake_cuda.facts import FACTS

import rmm_managed_bridge

pytestmark = pytest.mark.fake_driver


class FakeDriver(Driver):
    """The fake by its exported functions, as a program calls them. Its work ends when told."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__(str(build()))
        self._fake = fake

    def enqueue(self, stream: int) -> int:
        self._fake.enqueue(self._fake.ambient(stream))
        return 0

    def hold(self, stream: int) -> Callable[[], None]:
        operation = self._fake.enqueue(self._fake.ambient(stream))
        return lambda: self._fake.finish(operation)


@pytest.fixture
def driver(fake: FakeCuda) -> Driver:
    """The fake as a program sees it."""
    return FakeDriver(fake)


@pytest.mark.parametrize("fact", [pytest.param(fact, id=fact.name) for fact in FACTS])
def test_it_does_what_the_real_driver_does(fake: FakeCuda, driver: Driver, fact: Fact) -> None:
    wrong = []
    for case, observed in try_out(driver, fact):
        reported = any("a capture" in violation for violation in fake.violations()) or case.fact.end == UNJOINED
        if observed != case.expected or reported == case.survives:
            wrong.append((case, (observed, fake.violations())))
        fake.clear()
    assert not wrong, summary(wrong)


def test_it_exports_all_that_the_bridge_calls(fake: FakeCuda) -> None:
    header = Path(rmm_managed_bridge.__file__).parent / "_native" / "cpp" / "driver" / "driver.hpp"
    if not header.exists():
        pytest.skip("an installed package has no headers")
    symbols = re.findall(r'^  X\(\w+, \w+, "(\w+)"\)', header.read_text(), re.MULTILINE)
    assert len(symbols) == 32
    assert [name for name in symbols if not hasattr(fake.lib, name)] == []


def test_work_ends_when_told_and_in_order(fake: FakeCuda, driver: Driver) -> None:
    a, b = fake.stream(), fake.stream()
    first, second = fake.enqueue(a), fake.enqueue(a)
    event = must(driver.event())
    assert driver.record(event, a.handle) == 0
    assert driver.wait(b.handle, event) == 0
    third = fake.enqueue(b)
    assert fake.advance(b) == 0, "its wait is not over"
    assert fake.ordered(second, b) and not fake.ordered(third, a)
    assert driver.query(event) == NOT_READY
    assert fake.advance(a, 5) == 2 and fake.done(first)
    assert driver.query(event) == 0
    assert fake.advance(b) == 1 and fake.done(third)


def test_a_wait_on_the_cpu_ends_what_it_waits_for_and_no_more(fake: FakeCuda, driver: Driver) -> None:
    a, b = fake.stream(), fake.stream()
    first, other = fake.enqueue(a), fake.enqueue(b)
    event = must(driver.event())
    driver.record(event, a.handle)
    later = fake.enqueue(a)
    assert driver.event_synchronize(event) == 0
    assert fake.done(first) and not fake.done(later) and not fake.done(other)


def test_the_legacy_stream_and_blocking_streams_order_each_other(fake: FakeCuda) -> None:
    legacy, blocking, free = fake.ambient(LEGACY), fake.stream(blocking=True), fake.stream()
    first, unrelated = fake.enqueue(blocking), fake.enqueue(free)
    second = fake.enqueue(legacy)
    assert fake.ordered(first, legacy) and not fake.ordered(unrelated, legacy)
    assert fake.ordered(second, blocking) and not fake.ordered(second, free)
    assert fake.ordered(second, fake.ambient(PER_THREAD))


def test_handles_come_back_and_old_ones_are_reported(fake: FakeCuda, driver: Driver) -> None:
    old = fake.stream()
    fake.destroy(old)
    assert driver.id_of(old.handle)[0] == INVALID_HANDLE
    assert driver.status(old.handle)[0] == INVALID_HANDLE
    assert len(fake.violations()) == 2, "the real driver crashes"
    fake.clear()
    assert fake.stream().handle == old.handle


def test_faults_and_hooks_apply_once(fake: FakeCuda, driver: Driver) -> None:
    ran: list[int] = []
    fake.fail("cuEventRecord", skip=1, result=999)
    fake.on_call("cuEventRecord", lambda: ran.append(1))
    event, stream = must(driver.event()), fake.stream()
    assert [driver.record(event, stream.handle) for _ in range(3)] == [0, 999, 0]
    assert ran == [1] and fake.calls("cuEventRecord") == 3
