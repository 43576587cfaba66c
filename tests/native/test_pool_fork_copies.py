"""What a forked child finds of managed memory: L8. The fake driver's is not inherited, as the real one's is not."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_cuda.pool import MIB, Bench
from helpers.forked import in_forked_child
from helpers.managed_numpy import Managed, read_dies

import rmm_managed_bridge as bridge

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture
def managed(bench: Bench) -> Iterator[Managed]:
    """NumPy's arrays on the fake device's managed memory."""
    with bridge.installed("host", frameworks=["numpy"]):
        yield Managed(bench)


@pytest.mark.behaviour("L8")
def test_a_child_reads_what_its_parent_had(managed: Managed) -> None:
    large, small = managed.arange(3 * MIB), [managed.full(100, number) for number in range(1000)]
    assert managed.owns(large) and managed.owns(small[0])

    def action() -> None:
        assert (large == np.arange(3 * MIB)).all()
        assert all((each == number).all() for number, each in enumerate(small))

    assert in_forked_child(action) == ""


@pytest.mark.behaviour("L8")
def test_without_a_copy_there_is_nothing_to_read(managed: Managed) -> None:
    """What the other tests here rest on."""
    array = managed.full(MIB, 1)
    with pytest.warns(bridge.BridgeWarning, match="SIGSEGV"), managed.forks("warn"):
        assert read_dies(array.ctypes.data)
    assert not read_dies(array.ctypes.data)


@pytest.mark.behaviour("L8")
def test_writes_on_either_side_are_not_seen_on_the_other(managed: Managed) -> None:
    array = managed.full(MIB, 1)
    reading, writing = os.pipe()

    def action() -> None:
        array[:1000] = 2
        os.read(reading, 1)
        assert array[-1] == 1 and array.sum() == MIB + 1000

    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    array[-1000:] = 3
    os.write(writing, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert array[0] == 1 and array.sum() == MIB + 2000


@pytest.mark.behaviour("L8")
def test_a_child_frees_and_resizes_what_it_found(managed: Managed) -> None:
    held = [managed.arange(MIB), managed.arange(MIB), managed.arange(50)]
    before = managed.bench.heap.numbers

    def action() -> None:
        del held[0]
        held[0].resize(2 * MIB, refcheck=False)
        held[1].resize(10_000, refcheck=False)
        for array, length in ((held[0], MIB), (held[1], 50)):
            assert (array[:length] == np.arange(length)).all() and not bridge.owns(array)
            array[:] = 1
        held.clear()
        assert managed.bench.heap.numbers == before
        np.ones(1000).sum()

    assert in_forked_child(action) == ""
    assert all((each == np.arange(len(each))).all() for each in held)


@pytest.mark.behaviour("L8")
def test_a_child_of_a_child_has_it_too(managed: Managed) -> None:
    array = managed.arange(MIB)

    def action() -> None:
        array[0] = 5
        calls = managed.bench.fake.calls()
        assert in_forked_child(lambda: check(5)) == ""
        array[0] = 6
        assert in_forked_child(lambda: check(6)) == ""
        assert managed.bench.fake.calls() == calls

    def check(first: int) -> None:
        assert array[0] == first and (array[1:] == np.arange(1, MIB)).all()

    assert in_forked_child(action) == ""
    assert array[0] == 0


@pytest.mark.behaviour("L8")
def test_holes_between_arrays_cost_a_child_no_mappings(managed: Managed) -> None:
    arrays = [managed.full(1024, number) for number in range(4000)]
    kept = arrays[::2]
    del arrays

    def action() -> None:
        assert all((each == 2 * number).all() for number, each in enumerate(kept))
        assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 200

    before = len(Path("/proc/self/maps").read_text().splitlines())
    assert in_forked_child(action) == ""


@pytest.mark.behaviour("L8")
@pytest.mark.parametrize("track", ["sites", "off"])
def test_blocks_that_nobody_tracks_are_found_as_well(managed: Managed, track: str) -> None:
    other = Bench(managed.bench.fake, track=track)
    ptr = other.allocate(MIB, cpu=True)
    ctypes.memset(ptr, 7, MIB)
    assert in_forked_child(lambda: expect(ctypes.string_at(ptr, MIB) == b"\7" * MIB)) == ""
    other.free(ptr)
    assert other.close()


def expect(true: bool) -> None:
    assert true
