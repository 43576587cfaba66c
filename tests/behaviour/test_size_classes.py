"""The sizes that blocks come in: what is wasted, what is aligned, and when a block grows where it is: N4."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import blocks, numpy_handler
from rmm_managed_bridge._native import pool as native_pool

KIB, MIB = 1 << 10, 1 << 20
CPU_UNIT, GPU_UNIT = 64, 512
"""As docs/design/pool.md has it: multiples of the unit up to eight, then eight steps to each doubling."""
LARGEST = 256 * MIB

near_steps = st.builds(
    lambda exponent, eighths, off: max((1 << exponent) // 8 * eighths + off, 1),
    st.integers(4, 27),
    st.integers(8, 16),
    st.integers(-2, 2),
)
sizes = st.integers(1, 8 * KIB) | st.integers(1, LARGEST) | near_steps


@pytest.fixture(scope="module")
def heap() -> Iterator[Any]:
    """One heap for the examples of a test: nothing is written, so that its memory is only address space."""
    heap = native_pool.host_pool()
    yield heap
    assert heap.retire()


@pytest.fixture(scope="module")
def handler(heap: Any) -> Iterator[Any]:
    """NumPy's four functions over that heap."""
    handler = numpy_handler.NumpyHandler()
    handler.use(heap)
    yield handler
    handler.use(None)


@pytest.mark.parametrize("alignment", [CPU_UNIT, GPU_UNIT])
@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "gpu"])
def test_waste_is_an_eighth_at_most_above_4_kib_and_less_than_a_unit_below_eight(
    heap: Any, cpu: bool, alignment: int
) -> None:
    """NumPy asks for an alignment of 64, devices for 256 or 512; with more than the unit the steps are as coarse."""
    unit = max(CPU_UNIT if cpu else GPU_UNIT, alignment)

    @given(sizes)
    @example(1)
    @example(8 * unit)
    @example(8 * unit + 1)
    @example(4 * KIB + 1)
    @example(2 * MIB)
    @example(2 * MIB + 1)
    def check(size: int) -> None:
        used = heap.numbers[1]
        ptr = heap.allocate(size, cpu=cpu, alignment=alignment)
        try:
            found = blocks.block_of(ptr)
            assert found is not None
            start, usable = found
            assert start == ptr
            assert ptr % alignment == 0
            waste = usable - size
            assert waste >= 0
            assert waste < unit if size <= 8 * unit else waste <= size / 8
            assert waste <= size / 8 or size <= 4 * KIB
            assert heap.numbers[1] - used == usable, "what the pool counts is what the block takes"
        finally:
            heap.deallocate(ptr)

    check()


@given(sizes)
def test_a_block_of_all_that_another_could_hold_is_of_the_same_size(heap: Any, size: int) -> None:
    """Else memory that was freed would not serve the next request of its own size."""
    for cpu in (True, False):
        ptr = heap.allocate(size, cpu=cpu)
        usable = blocks.block_of(ptr)[1]
        heap.deallocate(ptr)
        again = heap.allocate(usable, cpu=cpu)
        assert blocks.block_of(again)[1] == usable
        heap.deallocate(again)


@pytest.mark.behaviour("N4")
@given(st.integers(1, 64 * KIB) | st.integers(1, 4 * MIB), st.floats(0, 1))
def test_a_block_of_numpys_grows_in_place_within_its_size_class_and_moves_beyond(
    heap: Any, handler: Any, size: int, share: float
) -> None:
    """A large one stays where it is if there is room behind it."""
    ptr = handler.malloc(size)
    usable = blocks.block_of(ptr)[1]
    for now in (size + int((usable - size) * share), usable, size):
        assert handler.realloc(ptr, now) == ptr
        assert blocks.block_of(ptr) == (ptr, usable)
    moved = handler.realloc(ptr, usable + 1)
    assert moved != 0
    assert blocks.block_of(moved)[1] > usable
    if usable <= 2 * MIB:
        assert moved != ptr
        assert blocks.block_of(ptr) is None
    handler.free(moved)


@pytest.mark.behaviour("N4")
def test_resize_of_an_array_keeps_its_address_within_the_block_only() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        array = np.arange(1000, dtype="u1")
        address = array.ctypes.data
        for size in (1024, 961, 1000):  # the block is of 1024 bytes, the next smaller ones of 960
            array.resize(size, refcheck=False)
            assert array.ctypes.data == address
        array.resize(1025, refcheck=False)
        assert array.ctypes.data != address
        assert array[:961].tolist() == np.arange(961).astype("u1").tolist()
        del array
