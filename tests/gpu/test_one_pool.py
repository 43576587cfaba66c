"""One RMM managed pool behind NumPy, CuPy, Warp and RMM itself, on the real libraries."""

import contextlib
import gc
import warnings
from types import ModuleType

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]


def test_every_framework_allocates_from_the_one_pool_and_is_told_apart(bridge, cupy, warp, rmm_pool) -> None:
    with bridge.tag("load"):
        made = {
            "numpy": np.ones(1 << 18, "f4"),
            "cupy": cupy.ones(1 << 18, "f4"),
            "warp": warp.zeros(1 << 18, dtype=warp.float32, device="cuda:0"),
            "rmm": rmm_pool.DeviceBuffer(size=1 << 20),
        }
    for framework, array in made.items():
        found = bridge.allocation_of(array)
        assert found is not None
        assert (found.framework, found.requested_bytes, found.kind, found.device) == (framework, 1 << 20, "managed", 0)
        assert found.site.file == __file__
        assert found.tag == ("" if framework == "rmm" else "load")  # a DeviceBuffer allocates without the GIL
    by_framework = bridge.stats().by("framework")
    assert {name: by_framework[name].current_bytes for name in made} == dict.fromkeys(made, 1 << 20)


def test_the_memory_is_managed_as_the_driver_sees_it(bridge, cupy, warp) -> None:
    pointer = cupy.cuda.runtime.pointerGetAttributes(np.ones(1 << 18).ctypes.data)
    assert pointer.type == 3  # cudaMemoryTypeManaged
    assert warp.zeros(10, dtype=warp.float32, device="cuda:0").memory_kind is warp.MemoryKind.CUDA_MANAGED


@pytest.mark.behaviour("P5")
@pytest.mark.parametrize("route", ["numpy", "cupy", "warp", "rmm", "resource", "export to NumPy", "export to CuPy"])
def test_what_is_seen_to_come_is_seen_to_go(bridge, cupy, warp, rmm_pool, route) -> None:
    resource = rmm_pool.mr.get_current_device_resource()
    make = {
        "numpy": lambda: np.empty(4096, "u1"),
        "cupy": lambda: cupy.empty(4096, "u1"),
        "warp": lambda: warp.empty(4096, dtype=warp.uint8, device="cuda:0"),
        "rmm": lambda: rmm_pool.DeviceBuffer(size=4096),
        "resource": lambda: resource.deallocate(resource.allocate(4096), 4096),
        "export to NumPy": lambda: np.from_dlpack(bridge.as_dlpack(cupy.empty(4096, "u1"))),
        "export to CuPy": lambda: cupy.from_dlpack(bridge.as_dlpack(np.empty(4096, "u1"))),
    }[route]
    gc.collect()
    before = bridge.stats()
    for _ in range(1000):
        make()

    def fail_at_once() -> None:
        _kept = make()
        raise KeyError

    for _ in range(100):
        with contextlib.suppress(KeyError):
            fail_at_once()
    gc.collect()
    after = bridge.stats()
    assert after.total_count - before.total_count == 1100
    assert after.current_count == before.current_count
    assert after.foreign_frees == before.foreign_frees


@pytest.mark.behaviour("L4")
@pytest.mark.parametrize("change", ["another resource", "logging", "uninstall", "install again"])
def test_blocks_go_back_to_their_pool_whatever_is_set_by_then(bridge, cupy, warp, rmm_pool, tmp_path, change) -> None:
    made = [
        np.ones(1 << 18, "f4"),
        cupy.ones(1 << 18, "f4"),
        warp.ones(1 << 18, dtype=warp.float32, device="cuda:0"),
        rmm_pool.DeviceBuffer(size=1 << 20),
    ]
    heap = rmm_pool.mr.get_current_device_resource().pool
    assert heap.live_count == 4
    if change == "another resource":
        rmm_pool.mr.set_current_device_resource(rmm_pool.mr.CudaMemoryResource())
    elif change == "logging":
        rmm_pool.enable_logging(str(tmp_path / "rmm.log"))
    else:
        bridge.uninstall()
        if change == "install again":
            bridge.install(frameworks=["numpy", "cupy", "warp"])
    assert (made[0] == 1).all()
    made.clear()
    gc.collect()
    assert heap.live_count == 0
    if change in ("another resource", "logging"):
        with pytest.warns(bridge.BridgeWarning, match="was changed since"):
            bridge.uninstall()
        rmm_pool.disable_logging()


@pytest.mark.behaviour("L6")
def test_reinitialize_names_survivors_and_attaches_to_the_new_pool(bridge, cupy, warp, rmm_pool) -> None:
    with bridge.tag("old"):
        old = [
            np.ones(1 << 18, "f4"),
            cupy.ones(1 << 18, "f4"),
            warp.ones(1 << 18, dtype=warp.float32, device="cuda:0"),
        ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rmm_pool.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="256MiB")
    (warning,) = [each for each in caught if issubclass(each.category, bridge.BridgeWarning)]
    assert "3 live blocks, 3.00 MiB, of cupy, numpy, warp" in str(warning.message)
    assert __file__ in str(warning.message)
    new = [np.ones(1 << 18, "f4"), cupy.ones(1 << 18, "f4"), warp.ones(1 << 18, dtype=warp.float32, device="cuda:0")]
    buffer = rmm_pool.DeviceBuffer(size=1 << 20)
    pools = bridge.stats().pools
    assert [(each.current, each.current_count) for each in pools] == [(False, 3), (True, 4)]
    assert all((bridge.as_numpy(array) == 1).all() for array in old + new)
    del old, buffer, new
    gc.collect()
    assert [each.current_count for each in bridge.stats().pools if each.current] == [0]


def test_reinitialize_to_memory_that_numpy_cannot_use_is_one_clear_error(bridge, rmm_pool) -> None:
    with pytest.raises(bridge.InstallError, match=r"uninstalled.*managed_memory=True"):
        rmm_pool.reinitialize()
    assert not bridge.status().installed
    assert type(rmm_pool.mr.get_current_device_resource()) is rmm_pool.mr.CudaMemoryResource
    assert bridge.allocation_of(np.ones(10)) is None


@pytest.mark.behaviour("L7")
def test_uninstall_restores_what_each_framework_had(rmm_pool, cupy: ModuleType, warp: ModuleType) -> None:
    import rmm_managed_bridge as bridge

    resource = rmm_pool.mr.get_current_device_resource()
    mine = cupy.cuda.MemoryPool().malloc
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(mine)
    try:
        with bridge.installed(frameworks=["numpy", "cupy", "warp"]), bridge.installed():
            assert cupy.cuda.get_allocator() != mine
            assert rmm_pool.mr.get_current_device_resource() is not resource
        assert cupy.cuda.get_allocator() == mine
        assert rmm_pool.mr.get_current_device_resource() is resource
        assert type(warp.get_device_allocator("cuda:0")).__name__ != "WarpAllocator"
        assert bridge.allocation_of(np.ones(100)) is None
    finally:
        cupy.cuda.set_allocator(before)


def test_each_adapter_works_alone(rmm_pool, cupy: ModuleType, warp: ModuleType) -> None:
    import rmm_managed_bridge as bridge

    before = rmm_pool.mr.get_current_device_resource()
    resource = bridge.ManagedBridgeResource(before)
    assert resource.upstream_mr is before
    rmm_pool.mr.set_current_device_resource(resource)
    with cupy.cuda.using_allocator(bridge.cupy_allocator):
        assert bridge.allocation_of(cupy.ones(100)).framework == "cupy"
    with warp.ScopedAllocator("cuda:0", bridge.warp_allocator):
        assert bridge.allocation_of(warp.ones(100, dtype=warp.float32, device="cuda:0")).framework == "warp"
    try:
        for set_it in (warp.set_cuda_allocator, lambda allocator: warp.set_device_allocator("cuda:0", allocator)):
            set_it(bridge.warp_allocator)
            assert bridge.allocation_of(warp.ones(100, dtype=warp.float32, device="cuda:0")).framework == "warp"
    finally:
        warp.set_cuda_allocator(None)
    with bridge.numpy_allocator():
        assert bridge.allocation_of(np.ones(100)).kind == "managed"
    assert bridge.allocation_of(np.ones(100)) is None
    rmm_pool.mr.set_current_device_resource(before)
    gc.collect()
    assert resource.get_allocated_bytes() == 0


def test_the_resource_stands_under_and_over_others(rmm_pool, cupy: ModuleType) -> None:
    import rmm_managed_bridge as bridge

    mr = rmm_pool.mr
    bottom = bridge.ManagedBridgeResource(mr.get_current_device_resource())
    stack = mr.StatisticsResourceAdaptor(mr.LimitingResourceAdaptor(bottom, 64 << 20))
    stream = rmm_pool.pylibrmm.stream.Stream(obj=cupy.cuda.Stream(non_blocking=True))
    buffer = rmm_pool.DeviceBuffer(size=1 << 20, stream=stream, mr=stack)
    assert bottom.get_allocated_bytes() == 1 << 20
    assert bridge.allocation_of(buffer).framework == "rmm"
    with pytest.raises(MemoryError):
        rmm_pool.DeviceBuffer(size=65 << 20, stream=stream, mr=stack)
    del buffer
    assert bottom.get_allocated_bytes() == 0
    assert stack.allocation_counts.current_bytes == 0


def test_rmms_prefetch_adaptor_stands_over_the_resource(rmm_pool, cupy: ModuleType) -> None:
    import rmm_managed_bridge as bridge

    resource = bridge.ManagedBridgeResource(rmm_pool.mr.get_current_device_resource())
    adaptor = rmm_pool.mr.PrefetchResourceAdaptor(resource)
    stream = rmm_pool.pylibrmm.stream.Stream(obj=cupy.cuda.Stream(non_blocking=True))
    buffer = rmm_pool.DeviceBuffer(size=1 << 20, stream=stream, mr=adaptor)
    record = bridge.allocation_of(buffer)
    assert (record.framework, record.kind) == ("rmm", "managed")
    assert bridge.residency(buffer).last_prefetch == "cuda:0"
    assert bridge.prefetch(buffer, "cpu", stream)
    assert bridge.residency(buffer).last_prefetch == "cpu"
    buffer.prefetch()
    assert bridge.residency(buffer).last_prefetch == "cuda:0"
    del buffer
    assert resource.get_allocated_bytes() == 0
