"""The Warp adapter where there is no GPU, and on a stub of Warp that has some: I6, L7."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import stub_pools, stub_warp
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.adapters.warp import WarpAdapter

MIB = 1 << 20


@pytest.fixture
def real_warp() -> ModuleType:
    """Return Warp itself; the marker skips the test first where there is none."""
    import warp

    warp.config.quiet = True
    warp.init()
    return warp


@pytest.mark.behaviour("I6")
@pytest.mark.requires("warp", "no_gpu")
def test_an_imported_warp_without_a_gpu_is_named_with_its_reason(real_warp: ModuleType) -> None:
    assert "warp" in sys.modules
    bridge.install()
    assert bridge.status().backend == "host"
    array = np.ones(MIB, "u1")
    assert bridge.owns(array)
    for frameworks in (bridge.stats().frameworks, bridge.status().frameworks):
        assert frameworks["numpy"] == "hooked"
        assert "CUDA devices only" in frameworks["warp"]
    bridge.uninstall()
    assert bridge.owns(array)


@pytest.mark.behaviour("I6")
@pytest.mark.requires("warp", "no_gpu")
def test_a_warp_that_was_asked_for_is_an_error_and_nothing_is_half_installed(real_warp: ModuleType) -> None:
    with pytest.raises(bridge.BridgeError, match=r"there is none here; as_warp\(\)"):
        bridge.install(frameworks=["numpy", "warp"])
    assert not bridge.status().installed
    assert eventually(lambda: not bridge.stats().pools)
    assert not bridge.owns(np.ones(10))


@pytest.mark.behaviour("I6")
@pytest.mark.requires("warp", "no_gpu")
def test_adding_warp_later_fails_alone(real_warp: ModuleType) -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        before = bridge.status()
        with pytest.raises(bridge.FrameworkError):
            bridge.install(frameworks=["warp"])
        assert bridge.status() == before
        assert bridge.owns(np.ones(10))


@pytest.mark.behaviour("I6")
@pytest.mark.requires("warp", "no_gpu")
def test_warps_own_cpu_arrays_go_on_as_before(real_warp: ModuleType) -> None:
    with bridge.installed("host"):
        array = real_warp.full(1000, 7.0, dtype=float, device="cpu")
        assert not bridge.owns(array)
        assert (array.numpy() == 7).all()
        shared = bridge.as_warp(np.ones(1000, np.float32))
        real_warp.copy(shared, array)
        assert (bridge.as_numpy(shared) == 7).all()
        del shared


@pytest.mark.behaviour("I6")
def test_a_warp_whose_setter_refuses_is_not_hooked_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_pools.put_in_place(monkeypatch)
    warp = stub_warp.put_in_place(monkeypatch, 1, frozenset({0}))
    bridge.install()
    assert "no driver for custom allocators" in bridge.stats().frameworks["warp"]
    assert bridge.owns(np.ones(MIB, "u1"))
    bridge.uninstall()
    with pytest.raises(bridge.FrameworkError, match="no driver for custom allocators"):
        bridge.install(frameworks=["numpy", "warp"])
    assert not bridge.status().installed
    assert not bridge.owns(np.ones(10))
    assert warp.devices[0]._custom_allocator is None


@pytest.fixture
def two_heaps(make_heap: Callable[..., Any]) -> dict[int, Any]:
    """Return heaps that pass for those of devices 0 and 1."""
    return {number: make_heap(device=number) for number in (0, 1)}


def test_a_refusal_of_the_second_device_undoes_the_first(
    monkeypatch: pytest.MonkeyPatch, two_heaps: dict[int, Any]
) -> None:
    warp = stub_warp.put_in_place(monkeypatch, 2, frozenset({1}))
    theirs = object()
    warp.devices[0]._custom_allocator = theirs
    with pytest.raises(bridge.FrameworkError, match="cuda:1"):
        WarpAdapter(two_heaps).hook()
    assert [device._custom_allocator for device in warp.devices] == [theirs, None]


@pytest.mark.behaviour("L7")
def test_unhooking_puts_back_what_each_device_had(monkeypatch: pytest.MonkeyPatch, two_heaps: dict[int, Any]) -> None:
    warp = stub_warp.put_in_place(monkeypatch, 2)
    before, since = object(), object()
    warp.devices[0]._custom_allocator = before
    adapter = WarpAdapter(two_heaps)
    adapter.hook()
    assert all(device._custom_allocator is adapter._allocator for device in warp.devices)
    warp.devices[1]._custom_allocator = since
    assert adapter.unhook() == "Warp's allocator on cuda:1 was changed since and was left as it is"
    assert [device._custom_allocator for device in warp.devices] == [before, since]
    assert adapter.unhook() is None
    assert [device._custom_allocator for device in warp.devices] == [before, since]


@pytest.mark.behaviour("L7")
def test_uninstall_tells_of_an_allocator_that_was_set_since(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_pools.put_in_place(monkeypatch)
    warp = stub_warp.put_in_place(monkeypatch, 1)
    since = object()
    bridge.install(frameworks=["numpy", "warp"])
    warp.devices[0]._custom_allocator = since
    with pytest.warns(bridge.BridgeWarning, match="Warp's allocator on cuda:0 was changed since"):
        bridge.uninstall()
    assert warp.devices[0]._custom_allocator is since


@pytest.mark.behaviour("D6")
def test_an_ipc_handle_of_a_pool_array_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, two_heaps: dict[int, Any]
) -> None:
    warp = stub_warp.put_in_place(monkeypatch, 2)
    theirs = warp.array.ipc_handle
    adapter = WarpAdapter(two_heaps)
    adapter.hook()
    ptr = two_heaps[0].allocate(MIB)
    with pytest.raises(bridge.AccessError, match="no IPC handle"):
        warp.array(ptr).ipc_handle()
    assert warp.array(12345).ipc_handle() == b"handle of Warp's own"
    two_heaps[0].deallocate(ptr)

    class Patch:
        """What somebody else put in front since."""

    warp.array.ipc_handle = Patch
    adapter.unhook()
    assert warp.array.ipc_handle is Patch
    warp.array.ipc_handle = theirs
    adapter.hook()
    adapter.unhook()
    assert warp.array.ipc_handle is theirs


def test_the_allocator_says_what_its_memory_is_only_if_it_knows(
    monkeypatch: pytest.MonkeyPatch, make_heap: Callable[..., Any]
) -> None:
    warp = stub_warp.put_in_place(monkeypatch, 1)
    managed, system = make_heap(device=0, kind="managed"), make_heap(device=0, kind="system")
    kind = bridge.warp_allocator.__class__({0: managed}).memory_kind
    assert kind is warp.MemoryKind.CUDA_MANAGED
    for heaps in ({}, {0: system}, {0: managed, 1: system}):
        assert bridge.warp_allocator.__class__(heaps).memory_kind is None


def test_the_allocator_serves_the_current_device_with_provenance(
    monkeypatch: pytest.MonkeyPatch, two_heaps: dict[int, Any]
) -> None:
    stub_warp.put_in_place(monkeypatch, 2)
    allocator = bridge.warp_allocator.__class__(two_heaps)
    for number in (1, 0):
        monkeypatch.setattr(native_process, "current_device", lambda number=number: number)
        ptr = allocator.allocate(MIB)
        record = bridge.allocation_of(ptr)
        assert record is not None
        assert (record.framework, record.device, record.requested_bytes) == ("warp", number, MIB)
        assert record.site.file == __file__
        assert ptr % 256 == 0
        assert two_heaps[number].live_bytes == MIB
        allocator.deallocate(ptr, MIB)
        assert two_heaps[number].live_bytes == 0
    assert allocator.allocate(0) == 0
    allocator.deallocate(0, 0)
    with pytest.raises(MemoryError, match=r"1\.00 PiB"):
        allocator.allocate(1 << 50)
    with pytest.raises(ValueError, match="0 or more"):
        allocator.allocate(-1)
    assert "cuda:0" in repr(allocator)
    assert "cuda:1" in repr(allocator)


def test_the_allocator_alone_says_what_to_do_where_no_pool_serves(
    monkeypatch: pytest.MonkeyPatch, make_heap: Callable[..., Any]
) -> None:
    stub_warp.put_in_place(monkeypatch, 1)
    monkeypatch.setattr(native_process, "current_device", lambda: 0)
    allocator = bridge.warp_allocator.__class__()
    with pytest.raises(bridge.InstallError, match=r"call install\(\) first"):
        allocator.allocate(10)
    heap = make_heap(device=0)
    ptr = allocator.allocate(10)
    assert bridge.owns(ptr)
    allocator.deallocate(ptr, 10)
    assert heap.retire()
    # The pool is closed, so the allocator looks for another one.
    with pytest.raises(bridge.InstallError):
        allocator.allocate(10)


@pytest.mark.behaviour("L6")
def test_the_allocator_alone_leaves_a_retired_pool_that_still_has_blocks(
    monkeypatch: pytest.MonkeyPatch, make_heap: Callable[..., Any]
) -> None:
    stub_warp.put_in_place(monkeypatch, 1)
    monkeypatch.setattr(native_process, "current_device", lambda: 0)
    allocator = bridge.warp_allocator.__class__()
    old = make_heap(device=0)
    kept = allocator.allocate(MIB)
    old.retire()
    new = make_heap(device=0)
    ptr = allocator.allocate(MIB)
    where = native_pool.pool_containing(ptr)
    for each in (kept, ptr):
        allocator.deallocate(each, MIB)
    assert where is new
    assert eventually(lambda: old.closed), "the bridge's own thread closes it"
