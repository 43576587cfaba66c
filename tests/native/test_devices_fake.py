"""One pool for each device, on a fake driver with two: RMM is real, but for what asks CUDA itself: D1, D2, S3."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rmm
from fake_cuda import LEGACY, PER_THREAD, FakeCuda
from helpers.noting import Call, noting
from helpers.programs import HostMemory
from helpers.waiting import eventually

from rmm_managed_bridge._native import cupy_entry, torch_entry

pytestmark = pytest.mark.fake_driver
MIB = 1 << 20


class Upstreams:
    """RMM's resource of each device, over memory of the C library that passes for managed memory."""

    def __init__(self) -> None:
        self.made: list[HostMemory] = []

    def make(self) -> Any:
        self.made.append(HostMemory())
        return self.made[-1].resource

    def initialize(self, *, devices: Any = 0, **_: Any) -> None:
        """Do as RMM does: forget every device, and set those that are named."""
        for device in range(2):
            rmm.mr.set_per_device_resource(device, rmm.mr.CudaMemoryResource())
        for device in [devices] if isinstance(devices, int) else devices:
            rmm.mr.set_per_device_resource(device, self.make())


@pytest.fixture
def upstreams(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstreams]:
    """RMM with such resources on both devices, and its current device that of the fake."""
    import rmm._cuda.gpu

    from rmm_managed_bridge import machine
    from rmm_managed_bridge.lifecycle import resource

    machine.device_traits.cache_clear()
    before = [rmm.mr.get_per_device_resource(device) for device in range(2)]
    upstreams = Upstreams()
    monkeypatch.setattr(rmm._cuda.gpu, "getDevice", fake.lib.fake_current)
    monkeypatch.setattr(rmm._cuda.gpu, "setDevice", fake.set_current)
    monkeypatch.setattr(rmm.rmm, "_initialize", upstreams.initialize)
    monkeypatch.setattr(
        resource,
        "kind_of_resource",
        lambda mr: "managed" if isinstance(resource.bottom_of(mr), rmm.mr.CallbackMemoryResource) else "device",
    )
    rmm.reinitialize(devices=[0, 1])
    yield upstreams
    for device in range(2):
        rmm.mr.set_per_device_resource(device, before[device])
    machine.device_traits.cache_clear()


@pytest.fixture
def bridge(upstreams: Upstreams) -> Iterator[Any]:
    """The bridge on both devices, with no framework hooked."""
    import rmm_managed_bridge as bridge

    with bridge.installed("managed", devices=[0, 1], frameworks=[]):
        yield bridge


def bytes_by_device(bridge: Any) -> dict[Any, int]:
    return {device: usage.current_bytes for device, usage in bridge.stats().by("device").items() if usage.current_bytes}


@pytest.mark.parametrize("devices", ["all", [1, 0], "0,1"])
def test_each_device_gets_a_pool_of_its_own(upstreams: Upstreams, devices: Any) -> None:
    import rmm_managed_bridge as bridge

    with bridge.installed("managed", devices=devices, frameworks=[]) as installed:
        assert sorted(installed.devices) == [0, 1]
        assert bridge.status().devices == installed.devices
        for device, resource in installed.resources.items():
            assert rmm.mr.get_per_device_resource(device) is resource
            assert (resource.device, resource.kind) == (device, "managed")
    assert not any(
        isinstance(rmm.mr.get_per_device_resource(device), bridge.ManagedBridgeResource) for device in range(2)
    )
    with pytest.raises(bridge.ConfigError, match="device 2 does not exist; there are 2"):
        bridge.install("managed", devices=[0, 2], frameworks=[])


@pytest.mark.behaviour("D1")
def test_provenance_and_numbers_are_kept_apart(fake: FakeCuda, bridge: Any, upstreams: Upstreams) -> None:
    fake.set_current(0)
    ptrs = [rmm.mr.get_per_device_resource(device).allocate(size) for device, size in ((0, MIB), (1, 2 * MIB))]
    records = [bridge.allocation_of(ptr) for ptr in ptrs]
    assert [(record.device, record.requested_bytes, record.framework) for record in records] == [
        (0, MIB, "rmm"),
        (1, 2 * MIB, "rmm"),
    ]
    assert {int(key.removeprefix("cuda:")): size for key, size in named(bridge).items()} == {0: MIB, 1: 2 * MIB}
    assert [generation.current_bytes for generation in bridge.stats().pools] == [MIB, 2 * MIB]

    def free_both() -> None:
        for current in (1, 0):
            fake.set_current(current)
            # RMM's resource of the wrong device: the block goes to the pool that gave it.
            rmm.mr.get_per_device_resource(current).deallocate(ptrs[1 - current], MIB * (2 - current))
            assert (fake.lib.fake_current(), fake.lib.fake_context_depth()) == (current, 1)

    thread = threading.Thread(target=free_both)
    thread.start()
    thread.join()
    assert fake.lib.fake_current() == 0
    assert bytes_by_device(bridge) == {}
    assert bridge.stats().size_mismatches == 0
    assert [len(upstream.live) > 0 for upstream in upstreams.made] == [True, True]


def named(bridge: Any) -> dict[str, int]:
    """Return live bytes by the names of devices, as `snapshot` has them."""
    return {
        str(key) if str(key).startswith("cuda") else f"cuda:{key}": size
        for key, size in bytes_by_device(bridge).items()
    }


@pytest.mark.behaviour("D2")
@pytest.mark.parametrize("again", [[1], 1, [0], [0, 1]])
def test_reinitialising_one_device_leaves_none_untracked(
    fake: FakeCuda, bridge: Any, upstreams: Upstreams, again: Any
) -> None:
    """D2: RMM forgets its resources of all devices; ours stand where they stood, over the new pools where there are."""
    changed = [again] if isinstance(again, int) else again
    before = {device: rmm.mr.get_per_device_resource(device) for device in range(2)}
    old = {device: before[device].allocate(MIB) for device in range(2)}
    retired = "1 live block, 1.00 MiB" if len(changed) == 1 else "2 live blocks, 2.00 MiB"
    with pytest.warns(bridge.BridgeWarning, match=retired):
        rmm.reinitialize(devices=again)
    for device in range(2):
        resource = rmm.mr.get_per_device_resource(device)
        assert isinstance(resource, bridge.ManagedBridgeResource)
        assert (resource is before[device]) == (device not in changed)
        ptr = resource.allocate(2 * MIB)
        assert bridge.allocation_of(ptr).device == device
        resource.deallocate(ptr, 2 * MIB)
    assert bridge.status().devices == (0, 1)
    for device in range(2):
        rmm.mr.get_per_device_resource(device).deallocate(old[device], MIB)
    del before
    assert [upstream.wrong_frees for upstream in upstreams.made] == [[] for _ in upstreams.made]


def test_a_device_that_was_not_asked_for_says_what_to_do(upstreams: Upstreams) -> None:
    import rmm_managed_bridge as bridge
    from rmm_managed_bridge._native import pool as native_pool

    with bridge.installed("managed", devices=[0], frameworks=[]):
        with pytest.raises(bridge.InstallError, match="no pool of the bridge serves device 1"):
            native_pool.pool_serving(1)
        guest = torch_entry.TorchEntry(lambda handle, device: None)
        guest.use(0, native_pool.pool_serving(0))
        guest.use(1, None)
        with pytest.raises(RuntimeError, match=r"on device 1: no pool of the bridge serves this device(.|\n)*devices="):
            guest.malloc(MIB, 1, 0)
        guest.use(0, None)


@pytest.mark.behaviour("S3")
@pytest.mark.behaviour("D1")
def test_cupys_blocks_on_two_devices(fake: FakeCuda, bridge: Any, make_guest: Callable[[], Any]) -> None:
    """CuPy's frees name a device, which is the array's for a null pointer and does not matter else."""
    guest = make_guest()
    records = bridge.stats().total_count
    for device in range(2):
        fake.set_current(device)
        assert guest.malloc(0, device) == 0
        guest.free(0, 1 - device)
    assert bridge.stats().total_count == records
    fake.set_current(0)
    ptr = guest.malloc(MIB, 1)
    assert bridge.allocation_of(ptr).device == 1
    assert (fake.lib.fake_current(), fake.lib.fake_context_depth()) == (0, 1)
    guest.free(ptr, 0)
    assert bytes_by_device(bridge) == {}
    assert (fake.lib.fake_current(), fake.lib.fake_context_depth()) == (0, 1)


@pytest.fixture
def make_guest(bridge: Any) -> Callable[[], Any]:
    """Return CuPy's entry points on the pools that are installed, with the legacy stream as CuPy's current one."""
    from rmm_managed_bridge._native import pool as native_pool

    def make() -> Any:
        guest = cupy_entry.CupyEntry(lambda device: 0, lambda handle, device: None, lambda *_: None)
        for device in range(2):
            guest.use(device, native_pool.pool_serving(device))
        return guest

    return make


def test_upstream_sees_one_stream_which_is_the_bridges_own(fake: FakeCuda, upstreams: Upstreams) -> None:
    """Whatever streams the program works on, none of them reaches upstream."""
    import rmm_managed_bridge as bridge

    calls: list[Call] = []
    top = noting(upstreams.make(), "upstream", calls)
    resource = bridge.ManagedBridgeResource(top, device=0)
    streams = [fake.stream(blocking=bool(number % 2)) for number in range(4)]
    streams += [fake.ambient(handle) for handle in (LEGACY, PER_THREAD)]
    heap = resource.pool
    blocks = [heap.allocate((20 + number) * MIB, stream=stream.handle) for number, stream in enumerate(streams)]
    host = heap.allocate(50 * MIB, cpu=True)
    for block, stream in zip(blocks, streams, strict=True):
        heap.deallocate(block, stream=stream.handle)
    heap.deallocate(host)
    heap.trim()
    assert {call for _, call, _ in calls} == {"allocate", "deallocate"}
    (handle,) = {handle for _, _, handle in calls}
    assert handle not in {stream.handle for stream in streams}
    del resource
    assert eventually(lambda: heap.closed or heap.retire())
