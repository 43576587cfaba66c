"""Managed memory that is new to the device comes to it by a prefetch: see native/test_populate.py for the rules."""

import pytest

MIB = 1 << 20

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy")]


@pytest.mark.behaviour("A4")
def test_new_memory_of_a_device_is_populated_once(bridge, cupy) -> None:
    expected = int(cupy.arange(64 * MIB, dtype="u1").sum(dtype="u8"))  # which has memory for what follows
    populated = bridge.stats().populated_bytes
    assert populated >= 64 * MIB
    again = cupy.arange(64 * MIB, dtype="u1")
    assert int(again.sum(dtype="u8")) == expected
    assert bridge.stats().populated_bytes == populated


@pytest.mark.behaviour("A4")
def test_arrays_that_grow_are_right(bridge, cupy) -> None:
    array = cupy.zeros(MIB, "i4")
    piece = cupy.arange(MIB, dtype="i4")
    for _ in range(24):
        array = cupy.concatenate([array, piece])
    assert int(array.sum(dtype="i8")) == 24 * int(piece.sum(dtype="i8"))


@pytest.mark.behaviour("A4")
def test_the_cpu_may_be_the_first_to_write(bridge, cupy) -> None:
    array = cupy.empty(16 * MIB, "u1")
    host = bridge.as_numpy(array)
    host[:] = 7
    assert int(array.sum(dtype="u8")) == 7 * 16 * MIB
