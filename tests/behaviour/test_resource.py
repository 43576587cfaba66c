"""ManagedBridgeResource among RMM's other resources, over host memory: stacks, accounts, ends, and wrong frees."""

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rmm
from helpers.programs import HostMemory, must_succeed, run_python

import rmm_managed_bridge as bridge

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


ADAPTORS: dict[str, Callable[[Any], Any]] = {
    "pool": _pool,
    "statistics": rmm.mr.StatisticsResourceAdaptor,
    "tracking": rmm.mr.TrackingResourceAdaptor,
    "limiting": lambda upstream: rmm.mr.LimitingResourceAdaptor(upstream, 256 * MIB),
}


def test_blocks_are_aligned_apart_writable_and_accounted(memory: HostMemory) -> None:
    resource = bridge.ManagedBridgeResource(memory.resource)
    sizes = [1, 255, 256, 257, 4096, 100_000, MIB, 3 * MIB + 1, 40 * MIB]
    blocks = {resource.allocate(size): size for size in sizes}
    assert resource.get_allocated_bytes() == sum(sizes)
    ends = sorted((ptr, ptr + size) for ptr, size in blocks.items())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
    for ptr, size in blocks.items():
        assert ptr % 256 == 0
        record = bridge.allocation_of(ptr + size - 1)
        assert record is not None
        assert (record.ptr, record.requested_bytes, record.framework, record.kind) == (ptr, size, "rmm", "host")
        assert (record.site.file, record.device) == (__file__, -1)
    for ptr, size in blocks.items():
        resource.deallocate(ptr, size)
    assert resource.get_allocated_bytes() == 0


def test_nothing_is_taken_from_upstream_before_it_is_needed(memory: HostMemory) -> None:
    resource = bridge.ManagedBridgeResource(memory.resource)
    assert not memory.given
    assert resource.allocate(0) == 0
    assert not memory.given
    ptr = resource.allocate(1)
    assert memory.live_bytes >= 32 * MIB
    taken = len(memory.given)
    resource.deallocate(ptr, 1)
    for _ in range(1000):
        resource.deallocate(resource.allocate(4096), 4096)
    assert len(memory.given) == taken


@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_the_resource_stands_under_any_other(memory: HostMemory, adaptor: str) -> None:
    resource = bridge.ManagedBridgeResource(memory.resource)
    over = ADAPTORS[adaptor](resource)
    assert over.upstream_mr is resource
    held = resource.get_allocated_bytes()
    ptr = over.allocate(MIB)
    assert resource.get_allocated_bytes() == held + (0 if adaptor == "pool" else MIB)
    record = bridge.allocation_of(ptr)
    assert record is not None
    assert record.framework == "rmm"
    over.deallocate(ptr, MIB)
    del over
    gc.collect()
    assert resource.get_allocated_bytes() == 0


@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_the_resource_stands_over_any_other(memory: HostMemory, adaptor: str) -> None:
    under = ADAPTORS[adaptor](memory.resource)
    resource = bridge.ManagedBridgeResource(under)
    assert resource.upstream_mr is under
    ptr = resource.allocate(MIB)
    if adaptor in ("tracking", "limiting"):
        assert under.get_allocated_bytes() >= 32 * MIB
    if adaptor == "statistics":
        assert under.allocation_counts.current_count == 1
    resource.deallocate(ptr, MIB)
    assert resource.get_allocated_bytes() == 0
    bridge.trim()
    if adaptor in ("tracking", "limiting"):
        assert under.get_allocated_bytes() == 0
    if adaptor == "statistics":
        assert under.allocation_counts.current_bytes == 0


@pytest.mark.parametrize("between", ["inner", "rmm.mr.StatisticsResourceAdaptor(inner)"])
def test_one_bridge_over_another_is_refused_or_keeps_both_accounts(between: str) -> None:
    """In a program of its own: what goes wrong here is lost for good."""
    must_succeed(
        run_python(
            """
            import gc, sys
            import rmm
            import rmm_managed_bridge as bridge
            from helpers.programs import HostMemory, must_succeed, run_python

            memory = HostMemory()
            inner = bridge.ManagedBridgeResource(memory.resource)
            try:
                outer = bridge.ManagedBridgeResource(eval(sys.argv[1]))
            except bridge.ConfigError as error:
                assert "ManagedBridgeResource" in str(error)
                sys.exit(0)
            beside = inner.allocate(1000)
            ptr = outer.allocate(1 << 20)
            assert outer.get_allocated_bytes() == 1 << 20
            assert inner.get_allocated_bytes() >= 1 << 20
            outer.deallocate(ptr, 1 << 20)
            assert outer.get_allocated_bytes() == 0
            del outer
            gc.collect()
            assert inner.get_allocated_bytes() == 1000, inner
            inner.deallocate(beside, 1000)
            assert bridge.stats().foreign_frees == 0
            """,
            between,
        )
    )


def test_an_upstream_that_runs_out_is_a_memory_error_and_nothing_is_lost() -> None:
    memory = HostMemory(limit_bytes=70 * MIB)
    resource = bridge.ManagedBridgeResource(memory.resource)
    kept = []
    with pytest.raises(MemoryError, match="live"):
        for _ in range(10):
            kept.append(resource.allocate(20 * MIB))
    assert len(kept) >= 2
    resource.deallocate(kept.pop(), 20 * MIB)
    kept.append(resource.allocate(20 * MIB))
    for ptr in kept:
        resource.deallocate(ptr, 20 * MIB)
    assert resource.get_allocated_bytes() == 0


def test_an_upstream_that_raises_anything_is_a_memory_error() -> None:
    def refuse(size_bytes: int, stream: Any) -> int:
        raise RuntimeError("no")

    resource = bridge.ManagedBridgeResource(rmm.mr.CallbackMemoryResource(refuse, lambda *_: None))
    with pytest.raises(MemoryError):
        resource.allocate(MIB)
    assert resource.get_allocated_bytes() == 0


def test_a_limit_over_the_resource_holds(memory: HostMemory) -> None:
    resource = bridge.ManagedBridgeResource(memory.resource)
    limited = rmm.mr.LimitingResourceAdaptor(resource, MIB)
    ptr = limited.allocate(MIB // 2)
    with pytest.raises(MemoryError):
        limited.allocate(MIB)
    assert resource.get_allocated_bytes() == MIB // 2
    limited.deallocate(ptr, MIB // 2)


def test_a_free_through_another_resource_goes_where_the_block_came_from(memory: HostMemory) -> None:
    first, second = (bridge.ManagedBridgeResource(memory.resource) for _ in range(2))
    ptr = first.allocate(MIB)
    second.deallocate(ptr, MIB)
    assert (first.get_allocated_bytes(), second.get_allocated_bytes()) == (0, 0)
    with pytest.raises(bridge.ForeignPointerError):
        first.deallocate(ptr, MIB)


def test_wrong_frees_by_native_code_are_counted_and_go_nowhere(memory: HostMemory) -> None:
    resource = bridge.ManagedBridgeResource(memory.resource)
    over = rmm.mr.StatisticsResourceAdaptor(resource)  # calls the resource from C++, which cannot raise from a free
    ptr = over.allocate(4096)
    before = bridge.stats()
    over.deallocate(ptr + 64, 4096)
    assert bridge.stats().foreign_frees == before.foreign_frees + 1
    over.deallocate(ptr, 512)
    assert bridge.stats().size_mismatches == before.size_mismatches + 1
    over.deallocate(ptr, 4096)
    assert bridge.stats().foreign_frees == before.foreign_frees + 2
    assert resource.get_allocated_bytes() == 0


def test_a_subclass_works_and_may_hold_more(memory: HostMemory) -> None:
    class Named(bridge.ManagedBridgeResource):
        name = "mine"

    resource = Named(memory.resource, track="counters", maximum_pool_size="64MiB")
    assert (resource.kind, resource.device, resource.name) == ("host", -1, "mine")
    assert "Named" in repr(resource)
    assert "CallbackMemoryResource" in repr(resource)
    ptr = resource.allocate(MIB)
    with pytest.raises(MemoryError):
        resource.allocate(64 * MIB)
    resource.deallocate(ptr, MIB)


def test_many_threads_share_one_resource(memory: HostMemory) -> None:
    resource = bridge.ManagedBridgeResource(memory.resource)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(3_000):
                size = 1 + (seed * 7919 + turn * 104_729) % 100_000
                ptr = resource.allocate(size)
                record = bridge.allocation_of(ptr)
                assert record is not None
                assert (record.requested_bytes, record.thread) == (size, threading.get_native_id())
                resource.deallocate(ptr, size)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert resource.get_allocated_bytes() == 0
