"""Where what lies in a recording's file, as docs/design/recording.md has it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"RMMBREC1"
VERSION = 1
HEADER_BYTES = 4096
PLACE_BYTES = 64
ALLOCATE, DEALLOCATE, RESIZE, FAILURE, FOREIGN_FREE, SIZE_MISMATCH, DAMAGE = range(7)
ACTIONS = ("allocate", "deallocate", "resize", "failure", "foreign_free", "size_mismatch", "damage")
KINDS = ("host", "managed", "system", "device", "pinned")

Array = NDArray[Any]

EVENT = np.dtype(
    [
        ("sequence", "<u4"),
        ("action", "u1"),
        ("framework", "u1"),
        ("kind", "u1"),
        ("flags", "u1"),
        ("serial", "<u8"),
        ("ptr", "<u8"),
        ("bytes", "<u8"),
        ("extra", "<u8"),
        ("order", "<u8"),
        ("site", "<u4"),
        ("tag", "<u4"),
        ("thread", "<u4"),
        ("device", "<i2"),
        ("check", "<u2"),
    ]
)
BLOCK = np.dtype(
    [
        ("serial", "<u8"),
        ("ptr", "<u8"),
        ("bytes", "<u8"),
        ("stream", "<u8"),
        ("time_ns", "<i8"),
        ("site", "<u4"),
        ("tag", "<u4"),
        ("thread", "<u4"),
        ("device", "<i2"),
        ("framework", "u1"),
        ("kind", "u1"),
        ("resized_count", "<u4"),
        ("reserved", "<u4"),
    ]
)
HOLDER = np.dtype(
    [
        ("bytes", "<i8"),
        ("count", "<i8"),
        ("site", "<u4"),
        ("tag", "<u4"),
        ("device", "<i2"),
        ("framework", "u1"),
        ("kind", "u1"),
        ("reserved", "<u4"),
    ]
)
HOLDER_COUNT = 8192
HOLDER_BYTES = 2 * HOLDER_COUNT * HOLDER.itemsize
TEXT = np.dtype([(name, "<i4" if name == "line" else "<u4") for name in
                 ("bytes", "kind", "id", "line", "file_bytes", "via", "flags", "outer")])  # fmt: skip
TEXT_SITE, TEXT_TAG, TEXT_FRAMEWORK, TEXT_THREAD, TEXT_ABOUT = range(1, 6)

_FIXED = (
    ("version", "<u4", 8), ("header_bytes", "<u4", 12), ("file_bytes", "<u8", 16),
    ("events_offset", "<u8", 24), ("event_count", "<u8", 32),
    ("blocks_offset", "<u8", 40), ("block_count", "<u8", 48),
    ("text_offset", "<u8", 56), ("text_bytes", "<u8", 64),
    ("pid", "<u4", 72), ("start_order", "<u8", 80), ("start_time_ns", "<i8", 88), ("start_steady_ns", "<i8", 96),
    ("taken", "<u8", 128), ("text_used", "<u8", 192), ("text_lost", "<u8", 200),
    ("blocks_used", "<u8", 256), ("blocks_lost", "<u8", 264),
    ("clock_version", "<u4", 320), ("clock_order", "<u8", 328), ("clock_steady_ns", "<i8", 336),
    ("holders", "<u8", 384), ("holders_peak_bytes_0", "<i8", 392), ("holders_peak_bytes_1", "<i8", 400),
    ("ended", "<u8", 448), ("end_time_ns", "<i8", 456), ("current_bytes", "<i8", 464), ("peak_bytes", "<i8", 472),
)  # fmt: skip
_HEADER = np.dtype(
    {
        "names": [name for name, _, _ in _FIXED],
        "formats": [kind for _, kind, _ in _FIXED],
        "offsets": [offset for _, _, offset in _FIXED],
        "itemsize": HEADER_BYTES,
    }
)
_FACTORS = {
    "serial": 0x9E3779B97F4A7C15,
    "ptr": 0xC2B2AE3D27D4EB4F,
    "bytes": 0xFF51AFD7ED558CCD,
    "extra": 0xC4CEB9FE1A85EC53,
    "order": 0xD6E8FEB86659FD93,
}


@dataclass(frozen=True)
class Header:
    """The numbers of a header, as they are in the file."""

    version: int
    header_bytes: int
    file_bytes: int
    events_offset: int
    event_count: int
    blocks_offset: int
    block_count: int
    text_offset: int
    text_bytes: int
    pid: int
    start_order: int
    start_time_ns: int
    start_steady_ns: int
    taken: int
    text_used: int
    text_lost: int
    blocks_used: int
    blocks_lost: int
    clock_version: int
    clock_order: int
    clock_steady_ns: int
    holders: int
    holders_peak_bytes_0: int
    holders_peak_bytes_1: int
    ended: int
    end_time_ns: int
    current_bytes: int
    peak_bytes: int


def read_header(data: bytes) -> Header:
    """Return the header in the first 4096 bytes of a file."""
    found = np.frombuffer(data, _HEADER, 1)[0]
    return Header(**{name: int(found[name]) for name, _, _ in _FIXED})


def checks(events: Array) -> Array:
    """Return what the check of each event must be."""
    as_number = np.uint64

    def pair(high: Array, low: Array) -> Array:
        return high.astype(as_number) << as_number(32) | low.astype(as_number)

    small = (
        events["action"].astype("<u4") << 24
        | events["framework"].astype("<u4") << 16
        | events["kind"].astype("<u4") << 8
        | events["flags"]
    )
    total = pair(events["site"], events["tag"]) * as_number(0xA0761D6478BD642F)
    total ^= pair(events["thread"], events["sequence"]) * as_number(0xE7037ED1A0B428DB)
    total ^= pair(small, events["device"].view("<u2")) * as_number(0x8EBC6AF09C88C6E3)
    for name, factor in _FACTORS.items():
        total ^= events[name] * as_number(factor)
    return (total >> as_number(48)).astype("<u2")
