"""What memory is, as the bridge and the driver say; who can touch it; and no driver error for an IPC handle."""

import contextlib

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]

MIB = 1 << 20


def pool_arrays(cupy, warp, rmm):
    """One array of each framework, in the pool."""
    return [
        np.ones(MIB, "u1"),
        cupy.ones(MIB, "u1"),
        warp.zeros(MIB, dtype=warp.uint8, device="cuda:0"),
        rmm.DeviceBuffer(size=MIB),
    ]


@pytest.mark.behaviour("D5")
def test_pool_memory_is_managed_as_the_driver_says_too(bridge, cupy, warp, rmm_pool) -> None:
    from rmm_managed_bridge._native import blocks
    from rmm_managed_bridge.arrays.address import address_of

    for x in pool_arrays(cupy, warp, rmm_pool):
        assert (bridge.memory_kind(x), bridge.memory_owner(x)) == ("managed", "bridge")
        assert bridge.can_access("cpu", x) and bridge.can_access(0, x) and bridge.can_access("cuda:0", x)
        ptr = address_of(x).ptr
        assert blocks.driver_attribute(ptr, 8) == 1  # CU_POINTER_ATTRIBUTE_IS_MANAGED
        assert blocks.driver_attribute(ptr, 9) == 0  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        assert blocks.driver_attribute(ptr, 16, 0) in (3, None)  # ..._ACCESS_FLAGS


@pytest.mark.behaviour("D5")
def test_memory_of_others_is_named_and_judged(bridge, cupy, warp) -> None:
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        device = cupy.ones(MIB, "u1")
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        mempool = cupy.ones(MIB, "u1")
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc):
        managed = cupy.ones(MIB, "u1")
    pinned_memory = cupy.cuda.alloc_pinned_memory(MIB)
    pinned = np.frombuffer(pinned_memory, "u1", MIB)
    host = np.frombuffer(bytearray(MIB), "u1")
    kinds = {"device": device, "mempool": mempool, "managed": managed, "pinned": pinned, "host": host}
    assert {kind: bridge.memory_kind(x) for kind, x in kinds.items()} == {kind: kind for kind in kinds}
    assert {kind: bridge.can_access("cpu", x) for kind, x in kinds.items()} == {
        "device": False,
        "mempool": False,
        "managed": True,
        "pinned": True,
        "host": True,
    }
    from rmm_managed_bridge.machine import device_traits

    pageable = device_traits(0).pageable_memory_access
    assert [bridge.can_access(0, x) for x in kinds.values()] == [True, True, True, True, pageable]
    assert [bridge.memory_owner(x) for x in kinds.values()] == ["other", "other", "other", "wrapped", "wrapped"]
    view = cupy.ndarray(MIB, "u1", cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(device.data.ptr, MIB, device), 0))
    assert bridge.memory_owner(view) == "wrapped"
    if not pageable:
        with pytest.raises(bridge.AccessError, match="no HMM or ATS"):
            bridge.require_access(0, host)
    with pytest.raises(bridge.AccessError, match="which the CPU cannot reach; copy it"):
        bridge.require_access("cpu", device)
    with pytest.raises(bridge.AccessError, match="there is no device 33"):
        bridge.require_access(33, device)
    for nothing in (12345, object()):
        assert (bridge.memory_kind(nothing), bridge.memory_owner(nothing)) == ("unknown", "unknown")


@pytest.mark.behaviour("D5")
def test_questions_move_no_page_and_break_no_capture(bridge, cupy, streams) -> None:
    array = cupy.ones(16 * MIB, "u1")
    stream = streams()
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        array += 1
        for ask in (
            bridge.memory_kind,
            bridge.memory_owner,
            lambda x: bridge.can_access("cpu", x),
            bridge.allocation_of,
        ):
            ask(array)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    assert (bridge.as_numpy(array) == 2).all()


def test_checked_access_asks_at_each_view(bridge, cupy, warp) -> None:
    array = cupy.ones(100, "f4")
    with bridge.checked_access():
        assert bridge.as_numpy(array).sum() == 100
        assert bridge.as_cupy(bridge.as_numpy(array)).sum() == 100
        with warp.ScopedDevice("cuda:0"):
            assert bridge.as_warp(array).shape == (100,)
        with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
            foreign = cupy.ones(100, "f4")
        with pytest.raises(bridge.AccessError, match="the CPU cannot reach"):
            bridge.as_numpy(foreign)
        with warp.ScopedDevice("cpu"), pytest.raises(bridge.AccessError, match="the CPU cannot reach"):
            bridge.as_warp(foreign)
    with pytest.raises(bridge.ViewError):
        bridge.as_numpy(foreign)


@pytest.mark.behaviour("D6")
def test_no_framework_gives_the_drivers_error_for_an_ipc_handle(bridge, cupy, warp, rmm_pool) -> None:
    arrays = pool_arrays(cupy, warp, rmm_pool)
    _, of_cupy, of_warp, _ = arrays
    for ask in (
        *(lambda x=x: bridge.ipc_handle(x) for x in arrays),
        lambda: cupy.cuda.runtime.ipcGetMemHandle(of_cupy.data.ptr),
        of_warp.ipc_handle,
        of_warp[10:20].ipc_handle,
        bridge.as_warp(of_cupy).ipc_handle,
    ):
        with pytest.raises(bridge.BridgeError, match=r"cannot export managed memory(.|\n)*shared_memory"):
            ask()
    of_cupy += 1
    assert (bridge.as_numpy(of_cupy) == 2).all()
    memory = cupy.cuda.Memory(MIB)  # cudaMalloc's own: what CUDA says of it goes through
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
        assert len(cupy.cuda.runtime.ipcGetMemHandle(memory.ptr)) == 64
    bridge.uninstall()
    with pytest.raises(RuntimeError, match="IPC is not supported for managed-memory arrays"):
        of_warp.ipc_handle()  # Warp's own words again
