"""What memory is and who may touch it, by what a fake driver says of devices and addresses: D5, D6."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from fake_cuda.pool import MIB, Bench

pytestmark = pytest.mark.fake_driver

# CUpointer_attribute, CUmemorytype and CUdevice_attribute
MEMORY_TYPE, DEVICE_POINTER, IS_MANAGED, ORDINAL, ACCESS, MEMPOOL = 2, 3, 8, 9, 16, 17
HOST, DEVICE = 1, 2
MANAGED, CONCURRENT, PAGEABLE, UNIFIED = 83, 89, 88, 41
THEIRS, POOL = 0x7F00_0000_0000, 0x5000


def host_pool(**options: Any) -> Any:
    """Return a pool of the native core, which may be loaded only once the fake driver is."""
    from rmm_managed_bridge._native import pool

    return pool.host_pool(**options)


@pytest.fixture
def bridge(fake: FakeCuda) -> Iterator[Any]:
    """The bridge, asking the fake for the traits of its devices anew."""
    import rmm_managed_bridge as bridge
    from rmm_managed_bridge import machine

    machine.device_traits.cache_clear()
    yield bridge
    machine.device_traits.cache_clear()


def theirs(fake: FakeCuda, kind: int, *, device: int = 0, managed: bool = False, mempool: bool = False) -> int:
    """Return an address of another allocator, as the driver describes it."""
    for attribute, value in ((MEMORY_TYPE, kind), (IS_MANAGED, managed), (ORDINAL, device), (MEMPOOL, mempool * POOL)):
        fake.set_pointer(THEIRS, attribute, int(value))
    return THEIRS


@pytest.mark.behaviour("D5")
def test_kinds_of_ours_need_no_question(fake: FakeCuda, bridge: Any) -> None:
    for kind in ("managed", "system", "device", "pinned", "host"):
        heap = host_pool(ordered=True, device=0, kind=kind)
        ptr = heap.allocate(MIB, stream=0)
        fake.clear()
        assert bridge.memory_kind(ptr) == bridge.memory_kind(ptr + 4096) == kind
        assert fake.calls() == 0
        assert bridge.memory_owner(ptr) == "bridge"
        heap.deallocate(ptr)
        assert bridge.memory_owner(ptr) == "unknown"
        assert heap.retire()


@pytest.mark.behaviour("D5")
def test_kinds_of_others_are_the_drivers(fake: FakeCuda, bridge: Any) -> None:
    assert bridge.memory_kind(theirs(fake, DEVICE)) == "device"
    assert bridge.memory_kind(theirs(fake, DEVICE, mempool=True)) == "mempool"
    assert bridge.memory_kind(theirs(fake, DEVICE, managed=True)) == "managed"
    assert bridge.memory_kind(theirs(fake, HOST)) == "pinned"
    assert bridge.memory_owner(THEIRS) == "other"
    array = np.ones(10)
    assert (bridge.memory_kind(array), bridge.memory_owner(array)) == ("host", "other")
    assert bridge.memory_owner(np.frombuffer(bytearray(80))) == "wrapped"
    assert bridge.memory_owner(array[2:]) == "other"
    for nothing in (array.ctypes.data, 12345, 0, -1, 1 << 80, None, "text", object()):
        assert (bridge.memory_kind(nothing), bridge.memory_owner(nothing)) == ("unknown", "unknown")
        assert not bridge.can_access("cpu", nothing) and not bridge.can_access(0, nothing)


@pytest.mark.behaviour("D5")
@pytest.mark.parametrize("able", [1, 0])
def test_managed_memory_follows_what_the_devices_can_do(fake: FakeCuda, bridge: Any, able: int) -> None:
    bench = Bench(fake)
    for ptr in (bench.allocate(MIB, bench.owned()), theirs(fake, DEVICE, managed=True)):
        fake.clear()
        theirs(fake, DEVICE, managed=True)
        bridge.memory_kind(ptr)
        for device in range(2):
            fake.set_attribute(device, MANAGED, able)
            fake.set_attribute(device, CONCURRENT, able)
        assert [bridge.can_access(device, ptr) for device in ("cpu", 0, "cuda:1", "cuda")] == [bool(able)] * 4
    if not able:
        with pytest.raises(
            bridge.AccessError, match=r"no concurrent managed access\); wait for the whole device first"
        ):
            bridge.require_access("cpu", THEIRS)
        with pytest.raises(bridge.AccessError, match="does not support it; copy it"):
            bridge.require_access(1, THEIRS)
    assert bench.close()


@pytest.mark.behaviour("D5")
@pytest.mark.parametrize("able", [1, 0])
def test_host_memory_follows_what_the_devices_can_do(fake: FakeCuda, bridge: Any, able: int) -> None:
    for device in range(2):
        fake.set_attribute(device, PAGEABLE, able)
        fake.set_attribute(device, UNIFIED, able)
    heap = host_pool(kind="system", device=0, ordered=True)
    ptr = heap.allocate(100)
    pinned = theirs(fake, HOST)
    for x in (np.ones(10), ptr, pinned):
        assert bridge.can_access("cpu", x)
        assert bridge.can_access(0, x) == bridge.can_access(1, x) == bool(able)
    if not able:
        with pytest.raises(bridge.AccessError, match="no HMM or ATS"):
            bridge.require_access(0, ptr)
        with pytest.raises(bridge.AccessError, match="unified addressing"):
            bridge.require_access(0, pinned)
    heap.deallocate(ptr)
    assert heap.retire()


@pytest.mark.behaviour("D5")
@pytest.mark.parametrize("mempool", [True, False])
def test_device_memory_follows_peer_and_pool_access(fake: FakeCuda, bridge: Any, mempool: bool) -> None:
    ptr = theirs(fake, DEVICE, device=1, mempool=mempool)
    assert bridge.can_access(1, ptr)
    assert not bridge.can_access("cpu", ptr)
    assert not bridge.can_access(0, ptr), "nothing was set"
    if mempool:
        fake.set_pointer(ptr, DEVICE_POINTER, 1, seen_from=0)  # also where it may only be read
        for flags, expected in ((0, False), (1, False), (3, True)):
            fake.set_pointer(POOL, ACCESS, flags, seen_from=0)
            assert bridge.can_access(0, ptr) is expected
    else:
        fake.set_pointer(ptr, ACCESS, 3)
        assert not bridge.can_access(0, ptr), "the access flags say yes whatever is set"
        fake.set_pointer(ptr, DEVICE_POINTER, 1, seen_from=0)
        assert bridge.can_access(0, ptr)
    assert (fake.lib.fake_current(), fake.lib.fake_context_depth()) == (0, 1)
    fake.set_active(0, False)
    fake.clear()
    theirs(fake, DEVICE, device=1, mempool=mempool)
    if not mempool:  # a pool's access is asked of the pool, without a context
        fake.set_pointer(ptr, DEVICE_POINTER, 1, seen_from=0)
    fake.set_active(0, False)
    assert not bridge.can_access(0, ptr), "a device without a context was given access to nothing"
    assert fake.calls("cuDevicePrimaryCtxRetain") == 0, "and a question must not make one"
    with pytest.raises(bridge.AccessError, match="cuMemPoolSetAccess" if mempool else "enable peer access"):
        bridge.require_access(0, ptr)
    with pytest.raises(bridge.AccessError, match="the CPU cannot reach"):
        bridge.require_access("cpu", ptr)
    with pytest.raises(bridge.AccessError, match="no device 7"):
        bridge.require_access(7, ptr)


def test_a_device_is_a_number_a_name_or_a_frameworks_object(fake: FakeCuda, bridge: Any) -> None:
    class CupyDevice:
        id = 1

    class TorchDevice:
        def __str__(self) -> str:
            return "cuda:1"

    ptr = theirs(fake, DEVICE, device=1)
    assert all(bridge.can_access(device, ptr) for device in (1, "cuda:1", CupyDevice(), TorchDevice()))
    for wrong in ("gpu", "cuda:x", -1, True, None, 1.5):
        with pytest.raises(bridge.ConfigError, match="write 'cpu', 0 or 'cuda:0'"):
            bridge.can_access(wrong, ptr)


@pytest.mark.behaviour("D5")
def test_questions_touch_no_data_and_no_capture(fake: FakeCuda, bridge: Any) -> None:
    """The memory asked about is not mapped at all: a read would end the process."""
    ptr = theirs(fake, DEVICE)
    stream = fake.stream(blocking=True)
    fake.begin_capture(stream)
    bridge.memory_kind(ptr)
    bridge.memory_owner(ptr)
    bridge.can_access("cpu", ptr)
    bridge.can_access(1, ptr)
    assert fake.end_capture(stream)
    with pytest.raises(OSError, match="Bad address"):
        read_from(ptr)


def read_from(ptr: int) -> None:
    """Raise OSError if the address cannot be read."""
    import os

    read, write = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    got = libc.write(write, ctypes.c_void_p(ptr), ctypes.c_size_t(1))
    os.close(read)
    os.close(write)
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def test_checked_access_makes_views_ask(fake: FakeCuda, bridge: Any) -> None:
    bench = Bench(fake)
    ptr = bench.allocate(40, cpu=True)
    array = np.frombuffer((ctypes.c_char * 40).from_address(ptr), "f4")
    with bridge.checked_access():
        assert bridge.as_numpy(array) is array
        fake.set_attribute(0, CONCURRENT, 0)
        from rmm_managed_bridge import machine

        machine.device_traits.cache_clear()
        with pytest.raises(bridge.AccessError, match="no concurrent managed access"):
            bridge.as_numpy(array)
        with pytest.raises(bridge.AccessError, match="no concurrent managed access"):
            np.from_dlpack(bridge.as_dlpack(array))
    assert bridge.as_numpy(array) is array
    del array
    assert bench.close()


@pytest.mark.behaviour("D6")
@pytest.mark.parametrize("kind", ["managed", "device", "system", "host"])
def test_an_ipc_handle_is_refused_with_what_to_do_instead(fake: FakeCuda, bridge: Any, kind: str) -> None:
    heap = host_pool(ordered=True, device=0, kind=kind)
    ptr = heap.allocate(MIB, stream=0)
    with pytest.raises(bridge.AccessError, match=r"no IPC handle: .*(\n|.)*shared_memory(.|\n)*cudaMalloc") as caught:
        bridge.ipc_handle(ptr)
    assert isinstance(caught.value, RuntimeError)
    assert ("cannot export managed memory" in str(caught.value)) == (kind == "managed")
    assert bridge.owns(ptr)
    heap.deallocate(ptr)
    with pytest.raises(bridge.AccessError, match="ask the framework that made it"):
        bridge.ipc_handle(ptr)
    assert heap.retire()
