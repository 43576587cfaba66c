"""Files that are cut, damaged or newer: a clear error, or what is whole, and never more."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rmm_managed_bridge as bridge
from rmm_managed_bridge.recordings import read
from rmm_managed_bridge.recordings.layout import HEADER_BYTES, PLACE_BYTES

FILES = int(os.environ.get("BRIDGE_DAMAGED_FILES", "300"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a recording of a few hundred events."""
    path = tmp_path_factory.mktemp("recording") / "sound.rec"
    with bridge.installed("host"), bridge.record(path, size="4MiB"):
        kept = []
        for number in range(300):
            with bridge.tag(f"tag {number % 7}"):
                kept.append(np.empty(number + 1))
            if number % 3 == 0:
                kept.pop(0)
        del kept
    return path.read_bytes()


def _use(path: Path) -> None:
    """Ask for all that a reader may be asked for."""
    content = read(path)
    assert len(content.events) <= path.stat().st_size // PLACE_BYTES
    content.snapshot().peak.top(3)
    content.times_ns(content.events["order"])
    assert str(content.peak)


def test_every_event_of_a_sound_file_is_whole(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.rec"
    path.write_bytes(sound)
    content = read(path)
    assert content.notes == ()
    assert len(content.events) >= 400


@pytest.mark.parametrize("size_bytes", [0, 7, 8, 12, 200, HEADER_BYTES - 1])
def test_a_file_without_a_whole_header_is_refused(tmp_path: Path, sound: bytes, size_bytes: int) -> None:
    path = tmp_path / "a.rec"
    path.write_bytes(sound[:size_bytes])
    with pytest.raises(bridge.BridgeError):
        read(path)


def test_what_is_no_recording_is_refused_in_words(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.rec"
    path.write_text("something else")
    with pytest.raises(bridge.BridgeError, match="is no recording"):
        read(path)
    path.write_bytes(sound[:8] + (2).to_bytes(4, "little") + sound[12:])
    with pytest.raises(bridge.BridgeError, match="version 2, and this reads up to version 1"):
        read(path)
    path.write_bytes(bytes(4096))
    with pytest.raises(bridge.BridgeError, match="is empty"):
        read(path)
    with pytest.raises(bridge.BridgeError, match="No such file"):
        read(tmp_path / "none")
    with pytest.raises(bridge.BridgeError, match="Is a directory"):
        read(tmp_path)


def test_a_cut_file_gives_what_is_whole(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.rec"
    path.write_bytes(sound[: HEADER_BYTES + 100 * PLACE_BYTES + 5])
    content = read(path)
    assert len(content.events) == 100
    assert content.notes[0].startswith("the file was cut")


def test_a_flipped_bit_of_an_event_costs_that_event(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.rec"
    path.write_bytes(sound)
    count = len(read(path).events)
    for bit in range(32, PLACE_BYTES * 8, 37):
        damaged = bytearray(sound)
        damaged[HEADER_BYTES + 10 * PLACE_BYTES + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        content = read(path)
        assert (len(content.events), content.notes) == (count - 1, ("1 events are damaged and left out",))


_PLACES = st.one_of(
    st.integers(0, 511),
    st.integers(HEADER_BYTES, HEADER_BYTES + 500 * PLACE_BYTES),
    st.integers(0, (4 << 20) - 1),
)
_NUMBERS = st.one_of(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))


@settings(max_examples=FILES, deadline=None)
@given(
    flips=st.lists(st.tuples(_PLACES, st.integers(0, 7)), max_size=20),
    lies=st.lists(st.tuples(_PLACES, _NUMBERS), max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 4 << 20)),
)
def test_damage_is_an_error_or_a_note(
    tmp_path_factory: pytest.TempPathFactory,
    sound: bytes,
    flips: list[tuple[int, int]],
    lies: list[tuple[int, int]],
    cut: int | None,
) -> None:
    damaged = bytearray(sound)
    for place, bit in flips:
        damaged[min(place, len(damaged) - 1)] ^= 1 << bit
    for place, number in lies:
        start = min(place // 8 * 8, len(damaged) - 8)
        damaged[start : start + 8] = number.to_bytes(8, "little")
    path = tmp_path_factory.getbasetemp() / "damaged.rec"
    path.write_bytes(damaged[:cut])
    try:
        _use(path)
    except bridge.BridgeError as error:
        assert path.name in str(error)


@settings(max_examples=FILES, deadline=None)
@given(place=st.integers(0, 511), number=_NUMBERS)
def test_a_header_that_lies_is_an_error_or_a_note(
    tmp_path_factory: pytest.TempPathFactory, sound: bytes, place: int, number: int
) -> None:
    start = place // 8 * 8
    path = tmp_path_factory.getbasetemp() / "damaged.rec"
    path.write_bytes(sound[:start] + number.to_bytes(8, "little") + sound[start + 8 :])
    try:
        _use(path)
    except bridge.BridgeError as error:
        assert path.name in str(error)
