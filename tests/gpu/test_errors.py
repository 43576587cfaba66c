"""What a failed allocation says in each framework, and that nothing is lost by it."""

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]


@pytest.fixture
def small(rmm_pool, cupy, warp):
    import rmm_managed_bridge as bridge

    with bridge.installed(
        backend="managed", frameworks=["numpy", "cupy", "warp"], initial_pool_size="64MiB", maximum_pool_size="64MiB"
    ):
        yield bridge


@pytest.mark.behaviour("M2")
def test_out_of_memory_is_each_frameworks_own(small, cupy, warp, rmm_pool) -> None:
    kept = np.ones(1 << 18, "f4")
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match=r"cannot allocate 128 MiB: 1.00 MiB live(.|\n)*numpy"):
        cupy.empty(128 << 20, "u1")
    with pytest.raises(MemoryError, match="cannot allocate 128 MiB"):
        warp.empty(128 << 20, dtype=warp.uint8, device="cuda:0")
    with pytest.raises(MemoryError, match=r"Unable to allocate 128\. MiB") as caught:
        np.empty(128 << 20, "u1")
    assert caught.value.__notes__[0].startswith("cannot allocate 128 MiB: 1.00 MiB live")
    with pytest.raises(MemoryError):
        rmm_pool.DeviceBuffer(size=128 << 20)
    for make in (
        lambda: cupy.ones(1 << 18, "f4"),
        lambda: warp.ones(1 << 18, dtype=warp.float32, device="cuda:0"),
        lambda: np.ones(1 << 18, "f4"),
        lambda: rmm_pool.DeviceBuffer(size=1 << 20),
    ):
        make()
    assert kept.sum() == 1 << 18


def test_absurd_sizes_are_refused_before_the_driver_is_asked(bridge, cupy, rmm_pool) -> None:
    reserved = bridge.stats().reserved_bytes
    resource = rmm_pool.mr.get_current_device_resource()
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.empty(1 << 46, "u1")
    for size in (1 << 46, 1 << 50, 1 << 63):
        with pytest.raises(MemoryError):
            resource.allocate(size)
    with pytest.raises(ValueError, match="0 or more"):
        resource.allocate(-1)
    assert bridge.stats().reserved_bytes <= reserved


@pytest.mark.behaviour("S2")
def test_wrong_frees_go_nowhere(rmm_pool) -> None:
    import rmm_managed_bridge as bridge

    resource = bridge.ManagedBridgeResource(rmm_pool.mr.get_current_device_resource())
    before = bridge.stats().foreign_frees
    ptr = resource.allocate(4096)
    for wrong in (ptr + 64, 0x1234_5678_9000):
        with pytest.raises(bridge.ForeignPointerError):
            resource.deallocate(wrong, 4096)
    resource.deallocate(ptr, 4096)
    with pytest.raises(bridge.ForeignPointerError):
        resource.deallocate(ptr, 4096)
    resource.deallocate(0, 0)
    resource.deallocate(0, 64)
    assert resource.get_allocated_bytes() == 0
    assert bridge.stats().foreign_frees == before + 3


@pytest.mark.behaviour("S3")
def test_cupy_arrays_without_bytes(bridge, cupy) -> None:
    count = bridge.stats().total_count
    for array in (cupy.empty(0), cupy.zeros((3, 0))):
        assert array.device.id == cupy.cuda.runtime.getDevice()
    assert bridge.stats().total_count == count
    assert cupy.ones(8)[8:].size == 0


def test_a_resource_that_is_not_managed_says_what_to_do(rmm_pool) -> None:
    import rmm_managed_bridge as bridge

    rmm_pool.reinitialize()
    with pytest.raises(bridge.BackendError, match=r"managed_memory=True(.|\n)*initial_pool_size='2GiB'"):
        bridge.install()
    assert not bridge.status().installed
    with bridge.installed(backend="managed", initial_pool_size="64MiB") as built:
        assert built.backend == "managed"
        assert bridge.allocation_of(np.ones(10)).kind == "managed"


def test_system_memory_where_the_device_has_none(rmm_pool) -> None:
    import rmm_managed_bridge as bridge
    from rmm_managed_bridge.machine import device_traits

    if device_traits(0).pageable_memory_access:
        with bridge.installed(backend="system"):
            assert bridge.allocation_of(np.ones(10)).kind == "system"
    else:
        with pytest.raises(bridge.BackendError, match="no HMM or ATS"):
            bridge.install(backend="system")
