"""Warnings about what happened where nothing could be raised."""

import warnings

from rmm_managed_bridge._native import ledger
from rmm_managed_bridge.errors import BridgeWarning
from rmm_managed_bridge.records import Event
from rmm_managed_bridge.units import format_bytes

_DAMAGE = {
    "written_before": "was written in front of its start",
    "written_behind": "was written behind its end",
    "written_after_free": "was written after it was freed",
}


def warn() -> None:
    """Warn of everything that came up since the last call."""
    for kind, size_bytes, offset, event in ledger.take_notices():
        warnings.warn(BridgeWarning(_text(kind, size_bytes, offset, event)), stacklevel=2)


def _text(kind: str, size_bytes: int, offset: int, event: Event) -> str:
    if kind == "quarantine_full":
        return (
            f"{format_bytes(size_bytes)} of freed memory wait for device work that has not ended, more than "
            "maximum_quarantine_size allows; the pool takes more memory instead: look for a kernel that hangs, or "
            "synchronize the stream now and then"
        )
    tag = f', tag "{event.tag}"' if event.tag else ""
    return (
        f"memory is corrupt: the block of {size_bytes} bytes at {event.ptr:#x} ({event.framework}{tag}, {event.site}) "
        f"{_DAMAGE[kind]}, first at byte {offset}"
    )
