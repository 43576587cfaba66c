"""The environment variables of the bridge: which are set, and which of those it does not know."""

import difflib
from collections.abc import Iterable, Mapping

__all__ = ["PREFIX", "settings_in", "unknown_in"]

PREFIX = "RMM_BRIDGE_"
# Not arguments of `install`: what tests and measurements set, and what `record` reads.
_INTERNAL = frozenset({f"{PREFIX}{name}" for name in ("DRIVER_LIBRARY", "RECORD", "RECORD_SIZE", "RECORD_OWNER")})
_ALIKE = 0.6


def settings_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the bridge that are set and not empty, by name."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(PREFIX) and value != ""}


def unknown_in(environment: Mapping[str, str], arguments: Iterable[str]) -> list[str]:
    """Return a sentence about each variable of the bridge that stands for none of the `arguments` of `install`.

    Empty variables are left alone, as they are where they are known.
    """
    known = {PREFIX + argument.upper() for argument in arguments} | _INTERNAL
    return [_complaint(name, known) for name in settings_in(environment) if name not in known]


def _complaint(name: str, known: Iterable[str]) -> str:
    if name == f"{PREFIX}ON_OOM":
        return f"{name} is ignored: text cannot be called; pass a function, install(on_oom=...)"
    tails = [each.removeprefix(PREFIX) for each in sorted(known)]
    alike = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), tails, 1, _ALIKE)
    cure = f"did you mean {PREFIX}{alike[0]}?" if alike else "install() has no such argument; unset it"
    return f"{name} is ignored: {cure}"
