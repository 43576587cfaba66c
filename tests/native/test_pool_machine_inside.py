"""The pool's machine once more, with what another thread does inside of driver calls; see helpers/pool_inside.py."""

import pytest
from helpers.pool_inside import InsideMachine
from helpers.pool_memory import run_machine

pytestmark = pytest.mark.fake_driver


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_pool_is_safe_whatever_happens_inside_of_a_driver_call(monkeypatch: pytest.MonkeyPatch) -> None:
    run_machine(InsideMachine, monkeypatch, 500)
