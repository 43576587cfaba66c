"""One pool for each of two devices, on the real libraries."""

import gc
import threading

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
    assert [each.current_bytes for each in both.stats().generations if each.current] == [3 * MIB, 3 * MIB]
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
    assert [each.current_bytes for each in both.stats().generations if each.current] == [0, 0]
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
