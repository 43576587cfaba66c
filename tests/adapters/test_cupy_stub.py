"""The CuPy adapter on a stub of CuPy: hooks, unhooks and the entry points: L7, S3, M2."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import rmm
from helpers import stub_cupy, stub_pools
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import cupy_entry
from rmm_managed_bridge._native import pool as native_pool

MIB = 1 << 20
BOTH = ["numpy", "cupy"]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the stub of CuPy, which `install` can hook."""
    stub_pools.put_in_place(monkeypatch)
    return stub_cupy.put_in_place(monkeypatch)


def allocator_a(size_bytes: int) -> Any:
    raise AssertionError(f"allocator A was asked for {size_bytes} bytes")


def allocator_c(size_bytes: int) -> Any:
    raise AssertionError(f"allocator C was asked for {size_bytes} bytes")


@pytest.mark.behaviour("L7")
def test_uninstall_puts_back_the_same_allocator(cupy: Any) -> None:
    cupy.cuda.set_allocator(allocator_a)
    bridge.install(frameworks=BOTH)
    assert cupy.cuda.get_allocator() is not allocator_a
    block = cupy.alloc(MIB)
    record = bridge.allocation_of(block.ptr)
    assert record is not None
    assert (record.framework, record.requested_bytes, record.site.file) == ("cupy", MIB, stub_cupy.__file__)
    bridge.uninstall()
    assert cupy.cuda.get_allocator() is allocator_a
    assert bridge.owns(block.ptr)


@pytest.mark.behaviour("L7")
def test_install_inside_cupys_own_allocator_context_is_one_clear_error(cupy: Any) -> None:
    with cupy.cuda.using_allocator(allocator_a), pytest.raises(bridge.BridgeError, match="using_allocator"):
        bridge.install(frameworks=BOTH)
    assert not bridge.status().installed
    assert not bridge.owns(np.ones(10))
    assert cupy.cuda.get_allocator() is stub_cupy.default_allocator


@pytest.mark.behaviour("L7")
def test_uninstall_inside_cupys_own_allocator_context_leaves_no_hook_behind_in_silence(cupy: Any) -> None:
    bridge.install(frameworks=BOTH)
    with cupy.cuda.using_allocator(allocator_a), pytest.warns(bridge.BridgeWarning, match="CuPy"):
        bridge.uninstall()
    # What is left is the bridge's own allocator over a pool that is closed: an error, never an untracked block.
    with pytest.raises((bridge.BridgeError, MemoryError)):
        cupy.alloc(MIB)


@pytest.mark.behaviour("L7")
def test_nested_installs_unwind_in_order(cupy: Any) -> None:
    cupy.cuda.set_allocator(allocator_a)
    with bridge.installed(frameworks=BOTH) as outer:
        mine = cupy.cuda.get_allocator()
        with bridge.installed(frameworks=BOTH) as inner:
            assert inner is outer
            assert cupy.cuda.get_allocator() == mine
        assert cupy.cuda.get_allocator() == mine
        assert bridge.owns(cupy.alloc(MIB).ptr)
        assert bridge.owns(np.ones(10))
    assert cupy.cuda.get_allocator() is allocator_a
    assert not bridge.status().installed


@pytest.mark.behaviour("L7")
def test_an_allocator_that_was_set_since_stays_and_the_user_is_told(cupy: Any) -> None:
    bridge.install(frameworks=BOTH)
    cupy.cuda.set_allocator(allocator_c)
    with pytest.warns(bridge.BridgeWarning, match="CuPy's allocator was changed since and was left as it is"):
        bridge.uninstall()
    assert cupy.cuda.get_allocator() is allocator_c
    assert not bridge.owns(np.ones(10))


def test_cupy_is_added_to_a_bridge_that_has_numpy_only(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bridge.install(frameworks=["numpy"])
    assert cupy.cuda.get_allocator() is stub_cupy.default_allocator
    assert bridge.install(frameworks=["cupy"]) is first
    assert bridge.status().frameworks == {"numpy": "hooked", "cupy": "hooked"}
    assert bridge.owns(cupy.alloc(10).ptr)
    bridge.uninstall()
    assert cupy.cuda.get_allocator() is stub_cupy.default_allocator


def test_numpy_is_unhooked_when_cupy_fails(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(allocator: Any) -> None:
        raise ValueError("not now")

    monkeypatch.setattr(cupy.cuda, "set_allocator", refuse)
    with pytest.raises(bridge.InstallError, match="not now"):
        bridge.install(frameworks=BOTH)
    assert not bridge.status().installed
    assert not bridge.owns(np.ones(10))
    assert eventually(lambda: not bridge.stats().pools)


def test_an_unavailable_cupy_that_was_only_imported_is_named_with_its_reason(cupy: Any) -> None:
    cupy.cuda.is_available = lambda: False
    bridge.install()
    assert bridge.status().frameworks["cupy"] == "CuPy finds no CUDA device"
    assert bridge.status().frameworks["numpy"] == "hooked"
    bridge.uninstall()


def test_a_cupy_that_cannot_be_imported_is_an_error_that_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # Python's own way of saying that it cannot be
    with pytest.raises(bridge.FrameworkError, match=r"pip install .*\[cupy\]"):
        bridge.install("host", frameworks=["cupy"])
    assert not bridge.status().installed


@pytest.mark.requires("no_gpu")
def test_cupy_moves_to_the_new_pool_when_rmm_is_reinitialised(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmm.rmm, "_initialize", lambda **_: None)
    bridge.install(frameworks=BOTH)
    old = cupy.alloc(MIB)
    with pytest.warns(bridge.BridgeWarning, match="of cupy"):
        rmm.reinitialize()
    new = cupy.alloc(2 * MIB)
    assert [(each.current, each.current_bytes) for each in bridge.stats().pools] == [
        (False, MIB),
        (True, 2 * MIB),
    ]
    del old, new
    bridge.uninstall()


@pytest.mark.behaviour("D6")
def test_an_ipc_handle_of_a_pool_block_is_one_clear_error_and_others_go_through(cupy: Any) -> None:
    theirs = cupy.cuda.runtime.ipcGetMemHandle
    with bridge.installed(frameworks=BOTH):
        block = cupy.alloc(MIB)
        with pytest.raises(bridge.AccessError, match="no IPC handle"):
            cupy.cuda.runtime.ipcGetMemHandle(block.ptr)
        assert cupy.cuda.runtime.ipcGetMemHandle(12345) == theirs(12345)
        assert bridge.owns(block.ptr)
        del block
    assert cupy.cuda.runtime.ipcGetMemHandle is theirs


@pytest.mark.behaviour("M2")
def test_out_of_memory_is_cupys_own_class_and_says_who_holds_what(cupy: Any) -> None:
    with bridge.installed(frameworks=BOTH, maximum_pool_size="64MiB"):
        with bridge.tag("big"):
            kept = cupy.alloc(8 * MIB)
        with pytest.raises(stub_cupy.OutOfMemoryError) as caught:
            cupy.alloc(128 * MIB)
        text = str(caught.value)
        assert "128 MiB" in text
        assert '"big"' in text
        assert bridge.stats().current_bytes == 8 * MIB
        assert bridge.owns(cupy.alloc(MIB).ptr)
        del kept


@pytest.mark.behaviour("S3")
def test_an_array_without_bytes_takes_none_and_leaves_no_record(cupy: Any) -> None:
    with bridge.installed(frameworks=BOTH):
        before = bridge.stats()
        empty = cupy.alloc(0)
        assert empty.ptr == 0
        assert bridge.stats().total_count == before.total_count
        del empty
        after = bridge.stats()
    assert (after.current_count, after.foreign_frees) == (before.current_count, before.foreign_frees)


@pytest.mark.behaviour("S3")
def test_the_entry_points_take_no_bytes_and_null_pointers(host_heap: Any) -> None:
    guest = cupy_entry.CupyEntry(lambda device: 0, lambda handle, device: None, lambda *_: None)
    guest.use(1, host_heap)
    before = bridge.stats()
    assert guest.malloc(0, 1) == 0
    guest.free(0, 1)
    guest.free(0, -1)
    after = bridge.stats()
    assert (after.total_count, after.foreign_frees) == (before.total_count, before.foreign_frees)
    assert [guest.serves(device) for device in (-1, 0, 1, 64)] == [False, False, True, False]
    with pytest.raises(ValueError, match="between 0 and 63"):
        guest.use(64, host_heap)


def test_the_allocator_alone_serves_the_current_device(cupy: Any, make_heap: Callable[..., Any]) -> None:
    with pytest.raises(bridge.InstallError, match=r"call install\(\) first"):
        bridge.cupy_allocator(10)
    make_heap(device=0)
    cupy.cuda.set_allocator(bridge.cupy_allocator)
    block = cupy.alloc(MIB)
    record = bridge.allocation_of(block.ptr)
    assert record is not None
    assert (record.framework, record.device, record.site.file) == ("cupy", 0, stub_cupy.__file__)
    del block


@pytest.mark.behaviour("L6")
def test_the_allocator_alone_leaves_a_retired_pool_that_still_has_blocks(
    cupy: Any, make_heap: Callable[..., Any]
) -> None:
    old = make_heap(device=0)
    kept = bridge.cupy_allocator(MIB)
    old.retire()
    new = make_heap(device=0)
    block = bridge.cupy_allocator(MIB)
    where = native_pool.pool_containing(block.ptr)
    del kept, block
    assert where is new
    assert eventually(lambda: old.closed), "the bridge's own thread closes it"
