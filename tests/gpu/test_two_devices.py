"""One pool for each of two devices, on the real libraries."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu", "two_gpus"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]

MIB = 1 << 20


@pytest.fixture
def both(rmm_pool, cupy, warp):
    """The bridge on devices 0 and 1, over a small managed pool each."""
    import rmm_managed_bridge as bridge

    rmm_pool.reinitialize(
        pool_allocator=True,
        managed_memory=True,
        initial_pool_size="128MiB",
        maximum_pool_size="512MiB",
        devices=[0, 1],
    )
    bridge.install(frameworks=["numpy", "cupy", "warp"], devices=[0, 1])
    before = bridge.stats()
    yield bridge
    bridge.uninstall()
    gc.collect()
    for device in range(2):
        with cupy.cuda.Device(device):
            cupy.cuda.runtime.deviceSynchronize()
    assert bridge.stats().current_bytes <= before.current_bytes, bridge.snapshot()
    assert bridge.stats().foreign_frees == before.foreign_frees
    rmm_pool.reinitialize()


def make(cupy, warp, rmm, device, size=MIB):
    """One array of each framework on the device. The current device stays what it was."""
    before = cupy.cuda.runtime.getDevice()
    with cupy.cuda.Device(device):
        arrays = {"cupy": cupy.ones(size, "u1"), "rmm": rmm.DeviceBuffer(size=size)}
    assert cupy.cuda.runtime.getDevice() == before
    arrays["warp"] = warp.ones(size, dtype=warp.uint8, device=f"cuda:{device}")
    # Warp leaves the device of its last call current (ContextGuard::always_restore is false).
    cupy.cuda.runtime.setDevice(before)
    return arrays


@pytest.mark.behaviour("D1")
def test_each_device_serves_its_own_and_says_so(both, cupy, warp, rmm_pool) -> None:
    assert both.status().devices == (0, 1)
    with pytest.raises(both.InstallError, match="other settings"):
        both.install(devices=[0])
    for device in range(2):
        for framework, array in make(cupy, warp, rmm_pool, device).items():
            record = both.allocation_of(array)
            assert (record.framework, record.device, record.kind) == (framework, device, "managed")
            del array
    assert cupy.cuda.runtime.getDevice() == 0
    assert both.allocation_of(np.ones(10)).device == 0
    kept = [make(cupy, warp, rmm_pool, device) for device in range(2)]
    assert [each.current_bytes for each in both.stats().pools if each.current] == [3 * MIB, 3 * MIB]
    del kept


@pytest.mark.behaviour("D1")
def test_blocks_are_freed_from_any_thread_under_any_device(both, cupy, warp, rmm_pool) -> None:
    failures = []

    def drop(arrays, device) -> None:
        try:
            cupy.cuda.Device(device).use()
            for name in list(arrays):
                del arrays[name]
                gc.collect()
                if cupy.cuda.runtime.getDevice() != device:
                    failures.append(f"{name}: the current device changed")
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    for device in range(2):
        arrays = make(cupy, warp, rmm_pool, device)
        thread = threading.Thread(target=drop, args=(arrays, 1 - device))
        thread.start()
        thread.join()
    assert failures == []
    assert [each.current_bytes for each in both.stats().pools if each.current] == [0, 0]
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.behaviour("D2")
def test_reinitialising_one_device_leaves_none_untracked(both, cupy, warp, rmm_pool) -> None:
    old = make(cupy, warp, rmm_pool, 0)
    rmm_pool.reinitialize(
        pool_allocator=True, managed_memory=True, initial_pool_size="64MiB", maximum_pool_size="256MiB", devices=[1]
    )
    for device in range(2):
        for framework, array in make(cupy, warp, rmm_pool, device).items():
            record = both.allocation_of(array)
            assert (record.framework, record.device) == (framework, device)
    assert (both.as_numpy(old["cupy"]) == 1).all()
    del old


@pytest.mark.behaviour("S3")
def test_arrays_without_bytes_are_on_the_current_device(both, cupy, warp) -> None:
    count = both.stats().total_count
    for device in range(2):
        with cupy.cuda.Device(device):
            for array in (cupy.empty(0), cupy.zeros((3, 0))):
                assert array.device.id == device
            assert both.stats().total_count == count
            assert cupy.ones(8)[8:].device.id == device
        count = both.stats().total_count
        assert warp.empty(0, dtype=float, device=f"cuda:{device}").device.ordinal == device


@pytest.mark.behaviour("D5")
def test_managed_memory_is_reached_from_both(both, cupy, warp) -> None:
    with cupy.cuda.Device(1):
        array = cupy.arange(1 << 18, dtype="f4")
        cupy.cuda.get_current_stream().synchronize()
    assert [both.can_access(device, array) for device in ("cpu", 0, 1)] == [True, True, True]
    host = both.as_numpy(array)
    assert host[77] == 77
    assert both.as_cupy(host).device.id == 1, "a view lies on the device of its pool"
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc), cupy.cuda.Device(1):
        plain = cupy.ones(MIB, "u1")
    assert both.can_access(1, plain)
    assert isinstance(both.can_access(0, plain), bool)  # by peer access, which CuPy may have switched on
    assert not both.can_access("cpu", plain)
    with both.checked_access(), cupy.cuda.Device(0):
        assert both.as_cupy(host).device.id == 1


@pytest.mark.behaviour("G1")
def test_reuse_is_ordered_on_each_device(both, cupy, slow) -> None:
    with cupy.cuda.Device(1):
        stream, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        with stream:
            x = cupy.zeros(1 << 20, "f4")
            slow.fill(x, 1)
            del x
        with other:
            y = cupy.full(1 << 20, 2, "f4")
        stream.synchronize()
        other.synchronize()
        assert (cupy.asnumpy(y) == 2).all()
        del y


def driver_call(result):
    """Return what a call of the driver gave, but for its result code, which says that all went well."""
    from cuda.bindings import driver

    error, *values = result
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return values[0] if values else None


@pytest.fixture
def set_peer_access(cupy) -> Iterator[Callable[[bool], None]]:
    """Return a function that lets device 1 reach memory of device 0, or not. At the end it is as it was before.

    By the driver: the runtime would remember that the access was on or off already as an error of its own.
    """
    from cuda.bindings import driver

    contexts = [driver_call(driver.cuDevicePrimaryCtxRetain(driver_call(driver.cuDeviceGet(n)))) for n in range(2)]
    was_on: list[bool] = []

    def switch(on: bool) -> None:
        driver_call(driver.cuCtxPushCurrent(contexts[1]))
        try:
            (error,) = (
                driver.cuCtxEnablePeerAccess(contexts[0], 0) if on else driver.cuCtxDisablePeerAccess(contexts[0])
            )
        finally:
            driver_call(driver.cuCtxPopCurrent())
        already = (
            driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
            if on
            else driver.CUresult.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
        )
        assert error in (driver.CUresult.CUDA_SUCCESS, already), error
        was_on.append(on == (error == already))

    yield switch
    if was_on:
        switch(was_on[0])
    for number in range(2):
        driver_call(driver.cuDevicePrimaryCtxRelease(driver_call(driver.cuDeviceGet(number))))


@pytest.mark.behaviour("D5")
def test_peer_access_decides_who_reaches_device_memory(both, cupy, set_peer_access) -> None:
    if not cupy.cuda.runtime.deviceCanAccessPeer(1, 0):
        pytest.skip("these two devices cannot reach each other's memory")
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.Device(0), cupy.cuda.using_allocator(pool.malloc):
        array = cupy.ones(MIB, "u1")
        cupy.cuda.get_current_stream().synchronize()
    assert (both.memory_kind(array), both.memory_owner(array)) == ("device", "other")
    for on in (False, True, False, True, False):
        set_peer_access(on)
        assert both.can_access(1, array) is on
        assert both.can_access(1, array.data.ptr + 1000) is on
        assert both.can_access(0, array)
        if on:
            both.require_access(1, array)
        else:
            with pytest.raises(both.AccessError, match="device 1 has no access to; enable peer access"):
                both.require_access(1, array)
    managed = cupy.ones(MIB, "u1")
    assert both.can_access(1, managed), "managed memory needs none of this"


@pytest.mark.behaviour("D5")
def test_pool_access_decides_who_reaches_memory_of_a_cuda_pool(both, cupy) -> None:
    from cuda.bindings import driver

    if not cupy.cuda.runtime.deviceCanAccessPeer(1, 0):
        pytest.skip("these two devices cannot reach each other's memory")
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 1
    with cupy.cuda.Device(0):
        stream = cupy.cuda.Stream(non_blocking=True)
        handle = driver.CUstream(stream.ptr)
        pool = driver_call(driver.cuMemPoolCreate(properties))
        ptr = int(driver_call(driver.cuMemAllocFromPoolAsync(MIB, pool, handle)))
        try:
            stream.synchronize()
            assert both.memory_kind(ptr) == "mempool"
            assert both.can_access(0, ptr) and not both.can_access(1, ptr)
            with pytest.raises(both.AccessError, match="cuMemPoolSetAccess"):
                both.require_access(1, ptr)
            flags = driver.CUmemAccess_flags
            for access.flags, expected in (
                (flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE, True),
                (flags.CU_MEM_ACCESS_FLAGS_PROT_NONE, False),
                (flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE, True),
            ):
                driver_call(driver.cuMemPoolSetAccess(pool, [access], 1))
                assert both.can_access(1, ptr) is expected
                assert both.can_access(0, ptr)
        finally:
            driver_call(driver.cuMemFreeAsync(driver.CUdeviceptr(ptr), handle))
            stream.synchronize()
            driver_call(driver.cuMemPoolDestroy(pool))


@pytest.mark.behaviour("A1")
def test_an_array_is_prefetched_to_another_device_and_back(both, cupy, warp) -> None:
    arrays = [cupy.arange(MIB, dtype="f4"), np.arange(MIB, dtype="f4")]
    arrays.append(warp.array(arrays[1], dtype=warp.float32, device="cuda:0"))
    for array in arrays:
        assert both.allocation_of(array).device == 0
        for place, name in ((1, "cuda:1"), (0, "cuda:0"), (1, "cuda:1"), ("cpu", "cpu"), (0, "cuda:0")):
            result = both.prefetch(array, place)
            assert result, str(result)
            found = both.residency(array)
            assert (found.asked, found.last_prefetch) == (name, name)
        assert both.allocation_of(array).device == 0, "it belongs to the pool that gave it"
        assert (both.as_numpy(array) == np.arange(MIB)).all()
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.behaviour("D1")
def test_all_devices_are_served(rmm_pool, cupy, warp, gpu_install) -> None:
    import rmm_managed_bridge as bridge

    devices = list(range(cupy.cuda.runtime.getDeviceCount()))
    rmm_pool.reinitialize(
        pool_allocator=True,
        managed_memory=True,
        initial_pool_size="64MiB",
        maximum_pool_size="256MiB",
        devices=devices,
    )
    gpu_install(bridge, frameworks=["numpy", "cupy", "warp"], devices="all", maximum_pool_size="256MiB")
    try:
        assert bridge.status().devices == tuple(devices)
        for device in devices:
            for framework, array in make(cupy, warp, rmm_pool, device).items():
                record = bridge.allocation_of(array)
                assert (record.framework, record.device, record.kind) == (framework, device, "managed")
                del array
        current = [each for each in bridge.stats().pools if each.current]
        assert sorted(each.device for each in current) == devices
        assert [each.current_bytes for each in current] == [0] * len(devices)
    finally:
        bridge.uninstall()
        gc.collect()
        rmm_pool.reinitialize()


@pytest.mark.requires("torch")
@pytest.mark.behaviour("D1")
def test_tensors_of_two_devices_come_from_their_pools() -> None:
    """In a process of its own, which ends with tensors alive on both."""
    program = """
import torch
import gc, threading, rmm
import rmm_managed_bridge as bridge
rmm.reinitialize(
    pool_allocator=True, managed_memory=True, initial_pool_size="64MiB", maximum_pool_size="512MiB", devices=[0, 1]
)
bridge.install(frameworks=["torch"], devices=[0, 1])
kept = [torch.full((1 << 20,), device + 1.0, device=f"cuda:{device}") for device in range(2)]
assert torch.cuda.current_device() == 0
with torch.cuda.device(1):
    kept.append(torch.full((1 << 20,), 3.0, device="cuda"))
records = [bridge.allocation_of(each) for each in kept]
assert [(each.framework, each.device, each.kind) for each in records] == [
    ("torch", 0, "managed"), ("torch", 1, "managed"), ("torch", 1, "managed")
], records
for number, tensor in enumerate(kept):
    assert (tensor == number + 1).all().item()
    assert (bridge.as_numpy(tensor) == number + 1).all()
    assert all(bridge.can_access(who, tensor) for who in ("cpu", 0, 1))
    view = bridge.as_torch(bridge.as_numpy(tensor))
    assert view.device == tensor.device and view.data_ptr() == tensor.data_ptr()
    del view, tensor
gone = [record.ptr for record in records[:2]]
problems = []
def drop(tensors, device):
    try:
        torch.cuda.set_device(device)
        tensors.clear()
        gc.collect()
        assert torch.cuda.current_device() == device
    except BaseException as error:
        problems.append(error)
for device in range(2):
    thread = threading.Thread(target=drop, args=([kept.pop(0)], 1 - device))
    thread.start()
    thread.join()
assert problems == [], problems
assert torch.cuda.current_device() == 0
assert [bridge.allocation_of(ptr) for ptr in gone] == [None, None]
kept.append(torch.ones(1 << 20, device="cuda:0"))
print("done")
"""
    command = [sys.executable, "-P", "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout[-5:]) == (0, "done\n"), f"{done.stdout}\n{done.stderr}"
    for bad in ("Traceback", "Exception ignored", "terminate called"):
        assert bad not in done.stderr, done.stderr
