"""Where memory can be: the CPU, or a device by number; as an argument, as a number and as text."""

from typing import Any

from rmm_managed_bridge._native.hint_table import CPU, NOWHERE
from rmm_managed_bridge.errors import ConfigError


def place_of(value: Any, name: str = "to") -> int:
    """Return the device number that `value` means, or `CPU`.

    Takes ``"cpu"``, ``"cuda:0"``, ``0``, and the device objects of CuPy, Warp, PyTorch and `cuda.core`.

    Raises
    ------
    ConfigError
        If it is none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        text = value.lower()
        if text in ("cpu", "host"):
            return CPU
        if text.startswith("cuda:") and text[5:].isdecimal():
            return int(text[5:])
    elif _is_cpu(value):
        return CPU
    else:
        for attribute in ("id", "ordinal", "index", "device_id"):  # CuPy, Warp, PyTorch, cuda.core
            number = getattr(value, attribute, None)
            if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
                return number
    raise ConfigError(f"{name}={value!r} is not a place for memory; write 'cpu', 'cuda:0' or a device number")


def _is_cpu(device: Any) -> bool:
    """Know the CPU of Warp, of PyTorch, and of cuda.core."""
    return (
        getattr(device, "is_cpu", False) is True
        or getattr(device, "type", None) == "cpu"
        or type(device).__name__ == "Host"
    )


def name_of(place: int) -> str | None:
    """Return ``"cpu"``, ``"cuda:0"`` and so on; None for nowhere in particular."""
    return None if place == NOWHERE else "cpu" if place == CPU else f"cuda:{place}"
