"""How a ManagedBridgeResource and its pool end: in any order, in cycles, once."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import rmm
from helpers.programs import HostMemory, must_succeed, run_python
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import pool as native_pool

MIB = 1 << 20
pytestmark = pytest.mark.requires("no_gpu")


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    """Return upstream memory. When all resources over it are gone, it has got everything back, once."""
    made = HostMemory()
    yield made
    assert not made.wrong_frees


def _pool(upstream: Any) -> Any:
    return rmm.mr.PoolMemoryResource(upstream, initial_pool_size=64 * MIB, maximum_pool_size=256 * MIB)


@pytest.mark.behaviour("L3")
@pytest.mark.parametrize("first", ["resource", "block"])
def test_the_pool_ends_with_the_later_of_resource_and_last_block(memory: HostMemory, first: str) -> None:
    resource = bridge.ManagedBridgeResource(memory.resource)
    number = resource.pool.number
    ptr = resource.allocate(MIB)
    if first == "resource":
        del resource
        gc.collect()
        generation = next(each for each in bridge.stats().pools if each.number == number)
        assert (generation.current, generation.current_bytes) == (False, MIB)
        assert memory.live_bytes > 0
        native_pool.any_pool().deallocate(ptr, MIB)
    else:
        resource.deallocate(ptr, MIB)
        assert memory.live_bytes > 0
        del resource
    gc.collect()
    assert eventually(lambda: memory.live_bytes == 0)  # the bridge's own thread gives it back
    assert eventually(lambda: number not in {each.number for each in bridge.stats().pools})


@pytest.mark.behaviour("L3")
def test_an_upstream_may_ask_for_a_report_as_it_goes(memory: HostMemory) -> None:
    """By then the pool it stood under is gone from the list: whoever closes it, nobody else does."""
    seen: list[set[int]] = []

    class Upstream(rmm.mr.LimitingResourceAdaptor):  # type: ignore[misc]
        def __del__(self) -> None:
            seen.append({each.number for each in bridge.status().pools})

    resource = bridge.ManagedBridgeResource(Upstream(memory.resource, 1 << 30))
    number = resource.pool.number
    ptr = resource.allocate(MIB)
    del resource
    gc.collect()
    native_pool.any_pool().deallocate(ptr, MIB)
    assert eventually(lambda: number not in {each.number for each in bridge.stats().pools})
    assert eventually(lambda: seen)
    assert number not in seen[0]


@pytest.mark.behaviour("L3")
def test_a_stack_in_a_cycle_is_collected_whole(memory: HostMemory) -> None:
    cycle: list[Any] = [bridge.ManagedBridgeResource(_pool(memory.resource))]
    cycle[0].deallocate(cycle[0].allocate(MIB), MIB)
    cycle.append(cycle)
    assert memory.live_bytes > 0
    del cycle
    gc.collect()
    assert memory.live_bytes == 0


@pytest.mark.behaviour("L3")
def test_a_resource_held_by_another_of_rmms_lives_on(memory: HostMemory) -> None:
    over = rmm.mr.StatisticsResourceAdaptor(bridge.ManagedBridgeResource(memory.resource))
    gc.collect()
    ptr = over.allocate(MIB)
    assert bridge.owns(ptr)
    over.deallocate(ptr, MIB)
    del over
    gc.collect()
    assert memory.live_bytes == 0


def test_a_closed_heap_stays_closed_and_says_so() -> None:
    heap = native_pool.host_pool()
    heap.deallocate(heap.allocate(MIB))
    assert heap.retire()
    assert heap.closed
    assert heap.retire()
    assert heap.close()
    assert bridge.trim() == 0
    with pytest.raises(bridge.BackendError, match=r"install\(\) again"):
        heap.allocate(MIB)


def test_a_pool_without_blocks_is_closed_at_once_whatever_the_bridges_thread_is_giving_back() -> None:
    program = """
        from rmm_managed_bridge._native import pool as native_pool
        from rmm_managed_bridge.config import PoolSettings

        for _ in range(1500):
            heap = native_pool.host_pool(settings=PoolSettings(release_threshold_bytes=0))  # which wakes the thread
            for ptr in [heap.allocate(3 << 20, cpu=True), *[heap.allocate(1 << 20, cpu=True) for _ in range(8)]]:
                heap.deallocate(ptr)
            assert heap.retire()
    """
    must_succeed(run_python(program))


def test_instances_do_not_use_up_references_to_their_class(memory: HostMemory) -> None:
    """A class over one of RMM's that is not made as RMM's are loses a reference to itself with each instance."""
    bridge.ManagedBridgeResource(memory.resource)
    gc.collect()
    before = sys.getrefcount(bridge.ManagedBridgeResource)
    for _ in range(50):
        bridge.ManagedBridgeResource(memory.resource)
    gc.collect()
    assert abs(sys.getrefcount(bridge.ManagedBridgeResource) - before) < 10


def test_trim_gives_back_what_is_free_and_keeps_what_is_not(memory: HostMemory) -> None:
    resource = bridge.ManagedBridgeResource(memory.resource)
    small, large = resource.allocate(4096), resource.allocate(100 * MIB)
    held = memory.live_bytes
    resource.deallocate(large, 100 * MIB)
    given_back = bridge.trim()
    assert given_back >= 100 * MIB
    assert memory.live_bytes == held - given_back
    assert bridge.owns(small)
    resource.deallocate(small, 4096)
    bridge.trim()
    assert memory.live_bytes == 0
