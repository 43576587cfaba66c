"""A device that cannot share managed pages with the CPU while it is busy (concurrentManagedAccess is 0): D3, D4."""

import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import GLOBAL, FakeCuda
from fake_cuda.pool import MIB, Bench
from helpers.stub_pools import UnattachedPools

import rmm_managed_bridge as bridge
from rmm_managed_bridge import machine
from rmm_managed_bridge._native import pool as native_pool

pytestmark = pytest.mark.fake_driver

MANAGED_MEMORY, CONCURRENT_MANAGED_ACCESS = 83, 89


class FakePools(UnattachedPools):
    """The pools of `install` on the fake driver: RMM's own classes need the real runtime."""

    def _make(self, device: int) -> Any:
        concurrent = machine.device_traits(device).concurrent_managed_access
        heap = native_pool.host_pool(ordered=True, device=device, kind="managed", concurrent=concurrent)
        return SimpleNamespace(pool=heap)


@pytest.fixture
def device(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return ``device(number, attribute, value)``, and let `install` make pools on the fake."""
    install = sys.modules["rmm_managed_bridge.lifecycle.install"]
    monkeypatch.setattr(install, "RmmPools", FakePools)
    machine.device_traits.cache_clear()
    yield fake.set_attribute
    machine.device_traits.cache_clear()


def _install(**arguments: Any) -> list[str]:
    """Install, and return the warnings that came with it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bridge.install("managed", **{"devices": [0], **arguments})
    assert all(issubclass(each.category, bridge.BridgeWarning) and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def _kind_of_numpy() -> str:
    array = np.ones(MIB, "u1")
    record = bridge.allocation_of(array)
    assert record is not None
    return record.kind


@pytest.mark.behaviour("D3")
@pytest.mark.parametrize("name", ["Linux", "Windows", "Darwin"])
@pytest.mark.parametrize("concurrent", [True, False])
def test_one_warning_and_numpy_on_host_memory_by_the_attribute_alone(
    device: Any, monkeypatch: pytest.MonkeyPatch, name: str, concurrent: bool
) -> None:
    monkeypatch.setattr(platform, "system", lambda: name)
    monkeypatch.setattr(sys, "platform", {"Windows": "win32", "Darwin": "darwin"}.get(name, "linux"))
    device(0, CONCURRENT_MANAGED_ACCESS, int(concurrent))
    said = _install()
    assert _kind_of_numpy() == ("managed" if concurrent else "host")
    bridge.uninstall()
    assert len(said) == (0 if concurrent else 1)
    assert all("NumPy stays on host memory" in text and "https://docs." in text for text in said)


@pytest.mark.behaviour("D3")
def test_numpy_goes_to_managed_memory_where_it_is_named(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device(0, CONCURRENT_MANAGED_ACCESS, 0)
    (said,) = _install(frameworks=["numpy"])
    assert "NumPy was named" in said
    assert _kind_of_numpy() == "managed"
    bridge.uninstall()
    monkeypatch.setenv("RMM_BRIDGE_FRAMEWORKS", "numpy")
    assert len(_install()) == 1
    assert _kind_of_numpy() == "managed"
    bridge.uninstall()


@pytest.mark.behaviour("D3")
def test_of_mixed_devices_the_least_able_one_decides(device: Any) -> None:
    device(1, CONCURRENT_MANAGED_ACCESS, 0)
    assert _install(devices=[0]) == []
    assert _kind_of_numpy() == "managed"
    bridge.uninstall()
    (said,) = _install(devices=[0, 1])
    assert said.startswith("device 1 of 0, 1 cannot share")
    assert _kind_of_numpy() == "host"
    bridge.uninstall()
    device(1, MANAGED_MEMORY, 0)
    machine.device_traits.cache_clear()
    assert bridge.detect_backend() == ("managed", "the device supports managed memory")
    assert bridge.detect_backend("all") == ("host", "device 1 does not support managed memory")


@pytest.mark.behaviour("D3")
def test_capabilities_are_read_once_for_each_device(fake: FakeCuda, device: Any) -> None:
    device(0, CONCURRENT_MANAGED_ACCESS, 0)
    _install()
    asked = fake.calls("cuDeviceGetAttribute")
    assert asked > 0
    for _ in range(10):
        assert bridge.as_numpy(np.ones(10)).all()
    bridge.uninstall()
    _install()
    bridge.uninstall()
    assert fake.calls("cuDeviceGetAttribute") == asked


class Interface:
    """An array of no framework, over managed memory."""

    def __init__(self, ptr: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
        }


@pytest.fixture
def exclusive(fake: FakeCuda) -> Iterator[Bench]:
    """A pool on a device without concurrent access."""
    bench = Bench(fake, concurrent=False)
    yield bench
    assert bench.close()


@pytest.mark.behaviour("D4")
def test_a_view_waits_for_the_whole_device_once(fake: FakeCuda, exclusive: Bench) -> None:
    ptr = exclusive.allocate(MIB)
    work = [fake.enqueue(exclusive.borrowed()), fake.enqueue(exclusive.owned())]
    fake.clear()
    view = bridge.as_numpy(Interface(ptr, MIB))
    assert fake.calls("cuCtxSynchronize") == 1
    assert all(map(fake.done, work)), "the pointer was handed out before the device was idle"
    assert view.ctypes.data == ptr
    fake.enqueue(exclusive.borrowed())
    assert bridge.as_numpy(Interface(ptr, MIB)).ctypes.data == ptr
    assert fake.calls("cuCtxSynchronize") == 2, "one wait before each hand-over"


@pytest.mark.behaviour("D4")
def test_a_view_on_a_concurrent_device_waits_for_no_other_stream(fake: FakeCuda, bench: Bench) -> None:
    ptr = bench.allocate(MIB)
    work = fake.enqueue(bench.borrowed())
    bridge.as_numpy(Interface(ptr, MIB))
    assert fake.calls("cuCtxSynchronize") == 0
    assert not fake.done(work)


@pytest.mark.behaviour("D4")
def test_a_wait_that_fails_is_an_error_and_no_pointer(fake: FakeCuda, exclusive: Bench) -> None:
    ptr = exclusive.allocate(MIB)
    fake.fail("cuCtxSynchronize")
    with pytest.raises(bridge.BridgeError, match="failed while waiting"):
        bridge.as_numpy(Interface(ptr, MIB))
    assert bridge.as_numpy(Interface(ptr, MIB)).ctypes.data == ptr


@pytest.mark.behaviour("D4")
@pytest.mark.parametrize("held", [True, False])
def test_no_wait_destroys_a_capture(fake: FakeCuda, exclusive: Bench, held: bool) -> None:
    """Of a stream that the bridge holds; or of a blocking one of which it knows only through the legacy stream."""
    ptr = exclusive.allocate(MIB)
    stream = exclusive.owned() if held else exclusive.borrowed(blocking=True)
    fake.begin_capture(stream, GLOBAL)
    with pytest.raises(bridge.BridgeError, match="end the capture first"):
        bridge.as_numpy(Interface(ptr, MIB))
    assert fake.calls("cuCtxSynchronize") == 0
    assert fake.end_capture(stream)
    assert bridge.as_numpy(Interface(ptr, MIB)).ctypes.data == ptr


@pytest.mark.behaviour("D4")
def test_the_wait_lets_go_of_the_gil_and_leaves_the_thread_as_it_was(fake: FakeCuda, exclusive: Bench) -> None:
    ptr = exclusive.allocate(MIB)
    fake.enqueue(exclusive.owned(), host=True)  # ends only if a Python function can run; else a violation
    fake.set_current(None)
    assert bridge.as_numpy(Interface(ptr, MIB)).ctypes.data == ptr
    assert (fake.lib.fake_current(), fake.lib.fake_thread_mode()) == (-1, GLOBAL)
    fake.set_current(0)
