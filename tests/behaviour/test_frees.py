"""Wrong sizes, wrong pointers, and arrays of nothing: S1, S2, S4."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.programs import CHeapBlock, HostMemory, recorded_events

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import ledger, numpy_handler

MIB = 1 << 20


class _HeapRoute:
    """A host heap, as the bridge's own code calls it."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.heap = request.getfixturevalue("host_heap")

    def allocate(self, size_bytes: int) -> int:
        return int(self.heap.allocate(size_bytes))

    def deallocate(self, ptr: int, size_bytes: int) -> None:
        self.heap.deallocate(ptr, size_bytes)

    def close(self) -> None:
        pass  # the fixture does


class _ResourceRoute:
    """An RMM resource, as RMM's users call it."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.memory = HostMemory()
        resource = bridge.ManagedBridgeResource(self.memory.resource)
        self.allocate = resource.allocate
        self.deallocate = resource.deallocate
        self.heap = resource.pool

    def close(self) -> None:
        assert not self.memory.wrong_frees


@pytest.fixture(params=[_HeapRoute, pytest.param(_ResourceRoute, marks=pytest.mark.requires("no_gpu"))])
def route(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return each of the ways in turn that Python code can free a block with a size."""
    made = request.param(request)
    yield made
    made.close()


@pytest.mark.behaviour("S1")
@pytest.mark.parametrize("stated", [512, 0, 4097, 1 << 63])
def test_the_recorded_size_wins_over_the_stated_one(route: Any, stated: int) -> None:
    before = bridge.stats()
    with bridge.tag("mismatch"), recorded_events(100):
        ptr = route.allocate(4096)
        record = bridge.allocation_of(ptr)
        route.deallocate(ptr, stated)
        events = [event for event in bridge.history() if event.action == "size_mismatch"]
    assert record is not None
    assert len(events) == 1
    event = events[0]
    assert (event.requested_bytes, event.stated_bytes) == (4096, stated)
    assert (event.ptr, event.serial, event.site, event.tag) == (ptr, record.serial, record.site, "mismatch")
    assert (event.framework, event.device, event.thread) == (record.framework, record.device, record.thread)
    after = bridge.stats()
    assert after.size_mismatches == before.size_mismatches + 1
    assert after.current_bytes == before.current_bytes

    first, second = route.allocate(4096), route.allocate(4096)
    assert abs(first - second) >= 4096
    route.deallocate(first, 4096)
    route.deallocate(second, 4096)
    assert bridge.stats().size_mismatches == before.size_mismatches + 1


@pytest.mark.behaviour("S2")
@pytest.mark.parametrize("case", ["c heap", "freed", "interior", "far away"])
def test_a_pointer_that_is_no_live_block_is_refused(route: Any, case: str) -> None:
    live = route.allocate(MIB)
    freed = route.allocate(MIB)
    route.deallocate(freed, MIB)
    with CHeapBlock(256) as foreign:
        ptr = {"c heap": foreign, "freed": freed, "interior": live + 64, "far away": 1 << 60}[case]
        before = bridge.stats()
        with pytest.raises(bridge.BridgeError, match="nothing was freed"):
            route.deallocate(ptr, 256)
        after = bridge.stats()
        assert after.foreign_frees == before.foreign_frees + 1
        assert (after.current_bytes, after.current_count) == (before.current_bytes, before.current_count)
        event = bridge.history().events[-1]
        assert (event.action, event.ptr, event.stated_bytes) == ("foreign_free", ptr, 256)
    # The live block is as it was.
    assert bridge.owns(live)
    route.deallocate(live, MIB)


@pytest.mark.behaviour("S2")
@pytest.mark.parametrize("size_bytes", [0, 64])
def test_freeing_null_does_nothing(route: Any, size_bytes: int) -> None:
    before = bridge.stats()
    route.deallocate(0, size_bytes)
    after = bridge.stats()
    assert (after.foreign_frees, after.current_count) == (before.foreign_frees, before.current_count)


@pytest.mark.behaviour("S2")
@pytest.mark.parametrize("case", ["freed", "interior"])
def test_a_wrong_free_by_numpys_native_destructor_is_counted_and_goes_nowhere(case: str, host_heap: Any) -> None:
    handler = numpy_handler.NumpyHandler()
    handler.use(host_heap)
    live, freed = handler.malloc(4096), handler.malloc(4096)
    handler.free(freed)
    before = bridge.stats()
    handler.free({"freed": freed, "interior": live + 64}[case])
    handler.free(0)
    after = bridge.stats()
    assert after.foreign_frees == before.foreign_frees + 1
    assert (after.current_bytes, after.current_count) == (before.current_bytes, before.current_count)
    assert bridge.history().events[-1].framework == "numpy"
    handler.free(live)
    handler.use(None)


@pytest.mark.behaviour("S2")
@pytest.mark.parametrize("track", ["sites", "counters", "off"])
@pytest.mark.parametrize("case", ["freed", "freed large", "interior"])
@pytest.mark.parametrize("size_bytes", [120, 4096, 5 * MIB], ids=["same class", "larger", "large"])
def test_resizing_what_is_no_live_block_is_refused(track: str, case: str, size_bytes: int, make_heap: Any) -> None:
    heap = make_heap(track=track)
    handler = numpy_handler.NumpyHandler()
    handler.use(heap)
    live, freed, large = handler.malloc(4096), handler.malloc(100), handler.malloc(5 * MIB)
    handler.free(freed, 100)
    handler.free(large, 5 * MIB)
    ptr = {"freed": freed, "freed large": large, "interior": live + 64}[case]
    before = (ledger.counters()[0], heap.live_count, heap.live_bytes)
    refused = ledger.counters()[2]
    assert handler.realloc(ptr, size_bytes) == 0
    assert ledger.counters()[2] == refused + 1
    assert (ledger.counters()[0], heap.live_count, heap.live_bytes) == before
    assert 0 < heap.live_bytes <= 8192, "of the one that is live"
    handler.free(live, 4096)
    assert (heap.live_count, heap.live_bytes) == (0, 0)
    handler.use(None)


@pytest.mark.behaviour("S2")
def test_a_double_free_never_hands_one_block_to_two_owners(route: Any) -> None:
    ptr = route.allocate(4096)
    route.deallocate(ptr, 4096)
    with pytest.raises(bridge.ForeignPointerError):
        route.deallocate(ptr, 4096)
    blocks = [route.allocate(4096) for _ in range(100)]
    assert len(set(blocks)) == 100
    for block in blocks:
        route.deallocate(block, 4096)


SHAPES = [(0,), (2, 0, 2), (0, 5)]
DTYPES = ["f8", "O", "S0", "V0"]


def _resized(shape: tuple[int, ...], dtype: str) -> Any:
    array = np.zeros(7, dtype)
    array.resize(0, refcheck=False)
    return array


@pytest.mark.behaviour("S4")
@pytest.mark.parametrize(
    "make",
    [
        np.empty,
        np.zeros,
        lambda shape, dtype: np.empty(shape, dtype).copy(),
        lambda shape, dtype: pickle.loads(pickle.dumps(np.empty(shape, dtype))),
        _resized,
    ],
    ids=["empty", "zeros", "copy", "pickle", "resize"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_without_elements_balance_and_show_one_byte(make: Callable[..., Any], dtype: str) -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        before = bridge.stats()
        arrays = [make(shape, dtype) for shape in SHAPES]
        for array in arrays:
            record = bridge.allocation_of(array.ctypes.data)
            # NumPy asks for at least one byte, so that is what is shown, never 0.
            assert record is not None
            assert record.requested_bytes == 1
        del arrays, array
        after = bridge.stats()
        assert (after.current_bytes, after.current_count) == (before.current_bytes, before.current_count)
        assert after.size_mismatches == before.size_mismatches
        assert after.foreign_frees == before.foreign_frees
