"""The real driver does what the fake one of tests/native does: both are held to helpers/driver_facts.py.

With `-s`, what nobody has seen the real driver do is printed as it is seen.
"""

from collections.abc import Callable

import pytest
from fake_cuda.calls import REAL_LIBRARY, Driver
from fake_cuda.cases import Fact, summary, try_out
from fake_cuda.facts import FACTS

pytestmark = [pytest.mark.requires("gpu")]


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver(REAL_LIBRARY)


@pytest.mark.parametrize("fact", [pytest.param(fact, id=fact.name) for fact in FACTS])
def test_the_driver_does_what_the_fake_does(
    driver: Driver, fact: Fact, record_property: Callable[[str, object], None]
) -> None:
    tried = list(try_out(driver, fact))
    record_property("observed", summary(tried))
    wrong = [(case, observed) for case, observed in tried if observed != case.expected]
    assert not wrong, summary(wrong)
