"""Which variables are the bridge's, and which it does not know."""

import string

from hypothesis import given
from hypothesis import strategies as st

from rmm_managed_bridge.config.environment import PREFIX, settings_in, unknown_in

ARGUMENTS = ("backend", "frameworks", "maximum_pool_size", "initial_pool_size", "track", "pool")
names = st.text(string.ascii_uppercase + "_", min_size=1, max_size=20).map(lambda tail: PREFIX + tail)
environments = st.dictionaries(names | st.text(max_size=8), st.text(max_size=3), max_size=6)


@given(environments)
def test_every_variable_is_known_or_told_once(environment: dict[str, str]) -> None:
    """What begins as ours, is set, and is no argument has one sentence that begins with its name; nothing else has."""
    known = {PREFIX + name.upper() for name in ARGUMENTS} | {"RMM_BRIDGE_DRIVER_LIBRARY"}
    told = [sentence.split()[0] for sentence in unknown_in(environment, ARGUMENTS)]
    assert told == sorted(
        name for name, value in environment.items() if name.startswith(PREFIX) and value and name not in known
    )


@given(environments)
def test_settings_are_what_is_set_and_ours(environment: dict[str, str]) -> None:
    found = settings_in(environment)
    assert found.items() <= environment.items()
    assert all(name.startswith(PREFIX) and value for name, value in found.items())


def test_the_nearest_name_is_offered() -> None:
    def only(name: str) -> str:
        (sentence,) = unknown_in({PREFIX + name: "1"}, ARGUMENTS)
        return sentence

    assert only("BACKND").endswith("did you mean RMM_BRIDGE_BACKEND?")
    assert only("MAX_POOL_SIZE").endswith("did you mean RMM_BRIDGE_MAXIMUM_POOL_SIZE?")
    assert only("XYZ").endswith("install() has no such argument; unset it")
    assert "pass a function, install(on_oom=...)" in only("ON_OOM")
