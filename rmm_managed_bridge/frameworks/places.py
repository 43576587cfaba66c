"""Where memory can be, or code run: the CPU, or a device by number; one meaning of each word in every call."""

from numbers import Integral
from typing import Any

from rmm_managed_bridge.errors import ConfigError, is_array, shown

CPU = -1
MOST_DEVICES = 64
"""The native part has room for this many; no driver is asked, so that the host backend makes no CUDA call."""


def device_number(value: Any, name: str, order: str) -> int:
    """Return the device number that `value` means, or `CPU`.

    Parameters
    ----------
    value
        ``"cpu"`` or ``"host"``, ``"cuda"`` (device 0) or ``"cuda:1"``, in any case of letters, a number, or a device
        object of CuPy, Warp, PyTorch or `cuda.core`.
    name
        The argument that it was given as.
    order
        Which argument comes first in that call, told to who gives an array or a stream here.

    Raises
    ------
    ConfigError
        If it is none of these, or a number that no device has.
    """
    number = _number(value)
    if number is None:
        if is_array(value) or hasattr(value, "__cuda_stream__"):
            what = "an array" if is_array(value) else "a stream"
            raise ConfigError(f"{name} is {what} ({shown(value)}), not a place for memory: {order}")
        raise ConfigError(
            f"{name}={shown(value)} is not a place for memory; write 'cpu', 0 or 'cuda:0', or pass a device object"
        )
    if number >= MOST_DEVICES:
        raise ConfigError(f"{name}={shown(value)}: device {number} does not exist; devices are 0 to {MOST_DEVICES - 1}")
    return number


def _number(value: Any) -> int | None:
    if isinstance(value, str):
        return _of_text(value)
    if value is None or isinstance(value, bool | float):
        return None
    if isinstance(value, Integral):
        return int(value) if int(value) >= 0 else None
    if is_array(value) or hasattr(value, "__cuda_stream__"):
        return None
    if (
        getattr(value, "is_cpu", False) is True  # Warp
        or getattr(value, "type", None) == "cpu"  # PyTorch
        or type(value).__name__ == "Host"  # cuda.core
    ):
        return CPU
    for attribute in ("id", "ordinal", "index", "device_id"):  # CuPy, Warp, PyTorch, cuda.core
        number = getattr(value, attribute, None)
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
            return number
    return _of_text(str(value))  # torch.device("cuda") has no index


def _of_text(text: str) -> int | None:
    word, colon, tail = text.strip().lower().partition(":")
    if word in ("cpu", "host") and not colon:
        return CPU
    if word == "cuda" and (not colon or (tail.isascii() and tail.isdigit())):
        return int(tail or 0)
    return None
