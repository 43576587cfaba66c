"""Reading a recording, whatever became of it: what is whole, and in words what is not."""

import mmap
import os
from pathlib import Path

import numpy as np

from rmm_managed_bridge.errors import BridgeError
from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.layout import (
    BLOCK,
    EVENT,
    HEADER_BYTES,
    HOLDER,
    HOLDER_BYTES,
    HOLDER_COUNT,
    KINDS,
    MAGIC,
    PLACE_BYTES,
    VERSION,
    Array,
    Header,
    checks,
    read_header,
)
from rmm_managed_bridge.recordings.texts import read_names

_HALF = np.uint64(0xFFFFFFFF)


def read(path: str | os.PathLike[str], *, with_events: bool = True) -> Content:
    """Return what is in a recording: of a program that has ended, was killed, or still runs.

    Takes memory for what is in the file, and no more than a few times the size that it has. Without events it is fast.

    Raises
    ------
    BridgeError
        If it is no recording, is cut before its first event, or was written by a newer version.
    """
    name = Path(path)
    try:
        with name.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            first = file.read(HEADER_BYTES)
            _require_recording(name, first)
            # Private, since another process may write: what is copied below is looked at once.
            data = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise BridgeError(f"cannot read the recording {name}: {getattr(error, 'strerror', None) or error}") from None
    view = memoryview(data)
    try:
        header = read_header(bytes(view[:HEADER_BYTES]))
        _require_shape(name, header)
        return _content(name, header, view, with_events)
    finally:
        view.release()
        data.close()


def _content(name: Path, header: Header, view: memoryview, with_events: bool) -> Content:
    notes = []
    if len(view) < header.file_bytes:
        notes.append(f"the file was cut: it has {len(view)} of {header.file_bytes} bytes")
    blocks = _blocks(header, view)
    events, damaged = _events(header, view) if with_events else (np.empty(0, EVENT), 0)
    if damaged:
        notes.append(f"{damaged} events are damaged and left out")
    used = min(header.text_used, header.text_bytes)
    with view[header.text_offset : header.text_offset + used] as text:
        names = read_names(text)
    if not names.whole:
        notes.append("the table of names is damaged: some lines, tags and frameworks are shown as numbers")
    if header.text_lost:
        notes.append(f"there was no room for {header.text_lost} names")
    if header.blocks_lost:
        notes.append(f"there was no room for {header.blocks_lost} live blocks: sums of what is live are too low")
    return Content(
        path=name,
        header=header,
        names=names,
        events=events,
        blocks=blocks,
        ledger_peak=_ledger_peak(header, view),
        notes=tuple(notes),
    )


def _require_recording(name: Path, first: bytes) -> None:
    if first[:8] != MAGIC:
        if not first.strip(b"\0"):
            raise BridgeError(f"{name} is empty: the recording ended before it had begun, or this is another file")
        raise BridgeError(f"{name} is no recording of rmm_managed_bridge; record() and `rmm-bridge run` make them")
    version = int.from_bytes(first[8:12], "little")
    if version > VERSION:
        raise BridgeError(
            f"{name} is a recording of version {version}, and this reads up to version {VERSION}; install a newer "
            "rmm_managed_bridge"
        )
    if len(first) < HEADER_BYTES:
        raise BridgeError(f"{name} was cut before its first event: it has {len(first)} bytes")


def _require_shape(name: Path, header: Header) -> None:
    """The parts lie one behind the other: any other numbers are no recording's."""
    count = header.event_count
    expected = (
        VERSION,
        HEADER_BYTES,
        HEADER_BYTES,
        HEADER_BYTES + count * PLACE_BYTES,
        HEADER_BYTES + (count + header.block_count) * PLACE_BYTES + HOLDER_BYTES,
        HEADER_BYTES + (count + header.block_count) * PLACE_BYTES + HOLDER_BYTES + header.text_bytes,
    )
    found = (
        header.version,
        header.header_bytes,
        header.events_offset,
        header.blocks_offset,
        header.text_offset,
        header.file_bytes,
    )
    if found != expected or count == 0 or count & (count - 1) or count > 1 << 31:
        raise BridgeError(f"the header of {name} is damaged: nothing in it can be found")


def _places(view: memoryview, offset: int, count: int, kind: np.dtype[np.void]) -> Array:
    count = min(count, max(len(view) - offset, 0) // PLACE_BYTES)
    if count <= 0:
        return np.empty(0, kind)
    return np.frombuffer(view, kind, count, offset)


def _blocks(header: Header, view: memoryview) -> Array:
    places = _places(view, header.blocks_offset, min(header.blocks_used, header.block_count), BLOCK)
    for _ in range(3):  # one that changes while it is copied is looked at again
        before = places["serial"].copy()
        found = places.copy()
        steady = (before == found["serial"]) & (places["serial"] == before)
        if steady.all():
            break
    found = found[steady & (found["serial"] != 0)]
    del places
    # A number twice would be a block twice; sizes beyond what addresses reach are damage.
    _, first = np.unique(found["serial"], return_index=True)
    found = found[first]
    sound: Array = (found["bytes"] < 1 << 56) & (found["kind"] < len(KINDS))
    return np.asarray(found[sound])


def _ledger_peak(header: Header, view: memoryview) -> tuple[int, Array]:
    """Return the peak that the ledger wrote down, and who held it."""
    half, count = header.holders & 1, min(header.holders >> 1, HOLDER_COUNT)
    start = header.text_offset - HOLDER_BYTES + half * HOLDER_COUNT * HOLDER.itemsize
    if count == 0 or start + count * HOLDER.itemsize > len(view):
        return 0, np.empty(0, HOLDER)
    found = np.frombuffer(view, HOLDER, count, start).copy()
    # What no machine has is damage.
    found = found[(found["bytes"] >= 0) & (found["bytes"] < 1 << 56) & (found["count"] > 0)]
    return (header.holders_peak_bytes_1 if half else header.holders_peak_bytes_0), found


def _events(header: Header, view: memoryview) -> tuple[Array, int]:
    """Return the whole events in order, and how many were damaged."""
    places = _places(view, header.events_offset, min(header.event_count, header.taken), EVENT)
    used = np.flatnonzero(places["sequence"])
    found = places[used]
    del places
    belongs = (found["sequence"].astype("<u8") - np.uint64(1)) & np.uint64(header.event_count - 1) == used
    whole = belongs & (checks(found) == found["check"])
    damaged = int(len(found) - np.count_nonzero(whole))
    found = found[whole]
    # Old places whose thread never came back to them are older than what was forgotten.
    taken = np.uint64(header.taken & 0xFFFFFFFFFFFFFFFF)
    age = (taken - found["sequence"].astype("<u8")) & _HALF
    kept = age < header.event_count
    found, age = found[kept], age[kept]
    return found[np.lexsort((np.uint64(header.event_count) - age, found["order"]))], damaged
