"""Bytes as text, and text as bytes."""

import re
from decimal import Decimal

from rmm_managed_bridge.errors import ConfigError

_BINARY = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "PIB": 1 << 50}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_UNITS = {**_BINARY, **_DECIMAL}
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")
_LIMIT_BYTES = 1 << 63
_LONGEST_NUMBER = 40


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Return `size` as a number of bytes.

    Parameters
    ----------
    size
        An integer of bytes, or text such as ``"2GiB"``, ``"512 MB"``, ``"1.5GiB"``. ``KB`` and its kin are powers
        of 1000, ``KiB`` and its kin powers of 1024, as in RMM's own parser.
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
            raise ConfigError(
                f"{name}={size!r} is not a size; write an integer of bytes, or text such as '512MiB' or '2GiB'"
            )
        # Decimal: 1.001KB is 1001 bytes, which binary fractions miss. Text that is longer than any size is not parsed.
        size_bytes = int(Decimal(match[1]) * unit) if len(match[1]) <= _LONGEST_NUMBER else _LIMIT_BYTES
    else:
        try:
            size_bytes = size.__index__()
        except (AttributeError, TypeError):
            raise ConfigError(
                f"{name}={size!r} is not a size; write an integer of bytes or text such as '2GiB'"
            ) from None
    if not 0 <= size_bytes < _LIMIT_BYTES:
        shown = repr(size) if not isinstance(size, str) or len(size) < 80 else f"{size[:40]!r}..."
        raise ConfigError(f"{name}={shown} is out of range; a size is between 0 and 2**63 - 1 bytes")
    return size_bytes


def parse_bytes_or_fraction(size: object, name: str = "size") -> int | float:
    """Return `size` as `parse_bytes` does, or, for a number with a point between 0 and 1, as that fraction.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    try:
        fraction = float(size) if isinstance(size, float) or (isinstance(size, str) and "." in size) else None
    except ValueError:  # with a unit
        fraction = None
    if fraction is None:
        return parse_bytes(size, name)  # type: ignore[arg-type]  # which says what is wrong with it
    if not 0 <= fraction <= 1:
        raise ConfigError(f"{name}={size!r} is not a size, nor a fraction between 0.0 and 1.0 of the memory there is")
    return fraction


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
