"""Bytes as text, and text as bytes."""

import contextlib
import operator
import re
from decimal import Decimal
from typing import Any

from rmm_managed_bridge.errors import ConfigError, shown

_BINARY = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "PIB": 1 << 50}
_DECIMAL = {f"{prefix}{unit}": 1000**power for power, prefix in enumerate("KMGTP", 1) for unit in ("B", "")}
_UNITS = {**_BINARY, **_DECIMAL}
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")
_LIMIT_BYTES = 1 << 63
_LONGEST_NUMBER = 40


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Return `size` as a number of bytes.

    Parameters
    ----------
    size
        An integer of bytes, or text such as ``"2GiB"``, ``"512 MB"``, ``"1.5GiB"``. ``KB`` and its kin are powers
        of 1000, ``KiB`` and its kin powers of 1024, as in RMM's own parser; ``"2G"`` is ``"2 GB"``.
    name
        What the size is for, used in the message.

    Raises
    ------
    ConfigError
        If the text is not a size, or the size is negative or above 2**63 - 1.
    """
    if isinstance(size, str):
        match = _TEXT.fullmatch(size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            share = "" if not _PERCENT.fullmatch(size) else ", and no share of the memory is taken here"
            raise ConfigError(
                f"{name}={shown(size)} is not a size{share}; write an integer of bytes, or text such as '512MiB' or "
                "'2GiB'"
            )
        # Decimal: 1.001KB is 1001 bytes, which binary fractions miss. Text that is longer than any size is not parsed.
        size_bytes = int(Decimal(match[1]) * unit) if len(match[1]) <= _LONGEST_NUMBER else _LIMIT_BYTES
    else:
        try:
            size_bytes = operator.index(_no_bool(size))
        except TypeError:
            raise ConfigError(
                f"{name}={shown(size)} is not a size; write an integer of bytes or text such as '2GiB'"
            ) from None
    if not 0 <= size_bytes < _LIMIT_BYTES:
        raise ConfigError(f"{name}={shown(size)} is out of range; a size is between 0 and 2**63 - 1 bytes")
    return size_bytes


def parse_bytes_or_fraction(size: object, name: str = "size") -> int | float:
    """Return `size` as `parse_bytes` does, or as a fraction: a number with a point, 0.0 to 1.0, or text as ``"50%"``.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    fraction: float | None = None
    if isinstance(size, float):
        fraction = size
    elif isinstance(size, str) and (percent := _PERCENT.fullmatch(size)):
        fraction = float(percent[1]) / 100
    elif isinstance(size, str) and "." in size:
        with contextlib.suppress(ValueError):  # with a unit
            fraction = float(size)
    if fraction is None:
        return parse_bytes(size, name)  # type: ignore[arg-type]  # which says what is wrong with it
    if not 0 <= fraction <= 1:
        raise ConfigError(f"{name}={shown(size)} is not a size, nor a fraction between 0.0 and 1.0 (or '50%')")
    return fraction


def _no_bool(size: object) -> Any:
    if isinstance(size, bool):
        raise TypeError("a truth value is an integer to Python, and a mistake here")
    return size


def format_count(number: int, noun: str) -> str:
    """Return ``"1 block"``, ``"2 blocks"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_bytes(size_bytes: int) -> str:
    """Return `size_bytes` for people: ``"512 B"``, ``"1.50 KiB"``, ``"16.0 MiB"``, always three figures or more."""
    sign, magnitude = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    if magnitude < 1024:
        return f"{sign}{magnitude} B"
    value = float(magnitude)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 1023.5 or unit == "PiB":
            break
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{sign}{value:.{digits}f} {unit}"
