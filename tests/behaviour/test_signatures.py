"""Signatures show the defaults that count, and every argument."""

import inspect

import pytest

import rmm_managed_bridge as bridge
from rmm_managed_bridge.config import read_config

pytestmark = pytest.mark.behaviour("U3")
SHOWN = {name: each.default for name, each in inspect.signature(bridge.install).parameters.items()}


def test_install_shows_what_its_defaults_are() -> None:
    assert (SHOWN["backend"], SHOWN["retain"], SHOWN["track"], SHOWN["hints"]) == ("auto", "budget", "sites", "none")
    assert SHOWN["numpy_min_bytes"] == 0
    assert SHOWN["initial_pool_size"] is SHOWN["on_oom"] is None


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_is_what_happens_without_it(name: str) -> None:
    said, unsaid = read_config(environment={}, **{name: SHOWN[name]}), read_config(environment={})
    assert getattr(said, name) == getattr(unsaid, name)


def test_a_variable_still_stands_for_an_argument_that_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMM_BRIDGE_TRACK", "counters")
    with bridge.installed("host"):
        assert bridge.status().track == "counters"


def test_installed_has_the_arguments_of_install() -> None:
    assert inspect.signature(bridge.installed).parameters == inspect.signature(bridge.install).parameters


def test_a_size_in_the_place_of_the_backend_is_told_where_it_belongs() -> None:
    with pytest.raises(bridge.ConfigError, match=r"for the size of the pool write install\(initial_pool_size='2GiB'\)"):
        bridge.install("2GiB")
    with pytest.raises(bridge.ConfigError, match=r"is not one of 'auto', 'managed', 'system', 'host'$"):
        bridge.install("hots")
