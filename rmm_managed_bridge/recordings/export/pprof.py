"""pprof's profile, a protocol buffer that is written field by field: its few messages need no package."""

import gzip
from collections.abc import Iterable
from pathlib import Path

from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.records import Holder

_UNITS = (("peak_objects", "count"), ("peak_space", "bytes"), ("inuse_objects", "count"), ("inuse_space", "bytes"))
_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _STRING, _TIME_NS, _DURATION_NS, _DEFAULT_TYPE = 1, 2, 4, 5, 6, 9, 10, 14


def write(content: Content, path: Path) -> None:
    """Write what was held at the peak, and at the end."""
    path.write_bytes(gzip.compress(_profile(content), mtime=0))


def _profile(content: Content) -> bytes:
    strings: dict[str, int] = {"": 0}
    functions: dict[tuple[str, str], int] = {}
    locations: dict[tuple[int, int], int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    def location(function: str, file: str, line: int) -> int:
        number = functions.setdefault((function, file), len(functions) + 1)
        return locations.setdefault((number, line), len(locations) + 1)

    def stack(holder: Holder) -> tuple[int, ...]:
        """Innermost first."""
        site = holder.site
        tags = [location(f"tag {part}", "", 0) for part in holder.tag.split("/")] if holder.tag else []
        line = location(site.function or site.file, site.file, site.line)
        return (line, *reversed(tags), location(holder.framework, "", 0))

    sums: dict[tuple[int, ...], list[int]] = {}
    for first, holders in ((0, content.peak.holders), (2, content.holders(content.blocks))):
        for holder in holders:
            values = sums.setdefault(stack(holder), [0] * len(_UNITS))
            values[first] += holder.current_count
            values[first + 1] += holder.current_bytes
    parts = [_message(_SAMPLE_TYPE, _number(1, text(kind)) + _number(2, text(unit))) for kind, unit in _UNITS]
    parts += [_message(_SAMPLE, _packed(1, where) + _packed(2, values)) for where, values in sums.items()]
    for (function, line), number in locations.items():
        parts.append(_message(_LOCATION, _number(1, number) + _message(4, _number(1, function) + _number(2, line))))
    for (name, file), number in functions.items():
        parts.append(_message(_FUNCTION, _number(1, number) + _number(2, text(name)) + _number(4, text(file))))
    default = text("peak_space")
    parts += [_message(_STRING, value.encode("utf-8", "replace")) for value in strings]
    header = content.header
    parts += [_number(_TIME_NS, max(header.start_time_ns, 0)), _number(_DEFAULT_TYPE, default)]
    parts.append(_number(_DURATION_NS, max(header.clock_steady_ns - header.start_steady_ns, 0)))
    return b"".join(parts)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _packed(field: int, values: Iterable[int]) -> bytes:
    return _message(field, b"".join(map(_varint, values)))
