"""Where memory can be: the CPU, or a device by number; as an argument, as a number and as text."""

from typing import Any

from rmm_managed_bridge._native.hint_table import CPU, NOWHERE
from rmm_managed_bridge.frameworks import places


def place_of(value: Any, name: str = "to", order: str = "the array comes first, prefetch(x, to)") -> int:
    """Return the device number that `value` means, or `CPU`; see `frameworks.places`.

    Raises
    ------
    ConfigError
        If it is none of these.
    """
    number = places.device_number(value, name, order)
    return CPU if number == places.CPU else number


def name_of(place: int) -> str | None:
    """Return ``"cpu"``, ``"cuda:0"`` and so on; None for nowhere in particular."""
    return None if place == NOWHERE else "cpu" if place == CPU else f"cuda:{place}"
