"""`as_torch` and who may touch the memory, on the fake driver and a stub of PyTorch: D5, I2."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from fake_cuda.pool import Bench
from helpers import stub_torch

import rmm_managed_bridge as bridge
from rmm_managed_bridge import machine

pytestmark = pytest.mark.fake_driver

MANAGED_MEMORY, CONCURRENT = 83, 89
RECORD = [("a", "f4"), ("b", "i8"), ("c", "u1")]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stub of PyTorch on the two devices of the fake driver."""
    return stub_torch.put_in_place(monkeypatch, devices=2)


@pytest.fixture
def array(bench: Bench, torch: Any) -> Any:
    """Return an array over a block of device 0, which the bench frees."""
    return np.frombuffer((ctypes.c_char * 64).from_address(bench.allocate(64, cpu=True)), "f4")


@pytest.fixture
def able(fake: FakeCuda) -> Iterator[Any]:
    """Return ``able(device, attribute, value)``."""

    def set_attribute(device: int, attribute: int, value: int) -> None:
        fake.set_attribute(device, attribute, value)
        machine.device_traits.cache_clear()

    machine.device_traits.cache_clear()
    yield set_attribute
    machine.device_traits.cache_clear()


@pytest.mark.behaviour("D5")
def test_checked_access_asks_for_the_device_that_is_pytorchs_current_one(torch: Any, array: Any, able: Any) -> None:
    able(1, MANAGED_MEMORY, 0)
    with bridge.checked_access():
        assert bridge.as_torch(array).data_ptr() == array.ctypes.data
        torch.device = 1
        with pytest.raises(bridge.AccessError, match="managed memory, and device 1 does not support it"):
            bridge.as_torch(array)
        torch.device = 0
        assert bridge.as_torch(array).data_ptr() == array.ctypes.data
    torch.device = 1
    assert bridge.as_torch(array).data_ptr() == array.ctypes.data, "unasked, the kind of memory is enough"


@pytest.mark.behaviour("D5")
def test_a_refusal_lends_nothing(fake: FakeCuda, bench: Bench, torch: Any, array: Any, able: Any) -> None:
    ptr = array.ctypes.data
    fake.clear()
    able(0, MANAGED_MEMORY, 0)
    with bridge.checked_access(), pytest.raises(bridge.AccessError):
        bridge.as_torch(array)
    assert fake.calls("cuStreamWaitEvent") == fake.calls("cuEventRecord") == 0
    del array
    bench.free(ptr)
    assert ptr in [bench.allocate(64, cpu=True) for _ in range(64)], "no stream is waited for"


@pytest.mark.behaviour("D5")
def test_a_tensor_is_checked_too(torch: Any, array: Any, able: Any) -> None:
    tensor = bridge.as_torch(array)
    able(0, MANAGED_MEMORY, 0)
    assert bridge.as_torch(tensor) is tensor
    with bridge.checked_access(), pytest.raises(bridge.AccessError, match="does not support it"):
        bridge.as_torch(tensor)


@pytest.mark.behaviour("D5")
def test_as_numpy_of_a_tensor_asks_for_the_cpu(torch: Any, array: Any, able: Any) -> None:
    source = bridge.as_torch(array).source  # what shows the interface of a real tensor
    able(0, CONCURRENT, 0)
    with bridge.checked_access():
        assert bridge.as_torch(array).data_ptr() == array.ctypes.data
        with pytest.raises(bridge.AccessError, match="no concurrent managed access"):
            bridge.as_numpy(source)


@pytest.mark.behaviour("I2")
def test_a_structured_array_is_refused_and_its_fields_are_shared_where_pytorch_can(bench: Bench, torch: Any) -> None:
    for aligned in (True, False):
        dtype = np.dtype(RECORD, align=aligned)
        size = 8 * dtype.itemsize
        records = np.frombuffer((ctypes.c_char * size).from_address(bench.allocate(size, cpu=True)), dtype)
        with pytest.raises(bridge.ViewError, match="PyTorch has no type for dtype"):
            bridge.as_torch(records)
        bytes_of_c = bridge.as_torch(records["c"])
        assert bytes_of_c.data_ptr() == records["c"].ctypes.data
        assert bytes_of_c.source.__cuda_array_interface__["strides"] == (dtype.itemsize,)
        if aligned:
            view = bridge.as_torch(records["b"])
            assert view.data_ptr() == records.ctypes.data + 8
        else:
            with pytest.raises(bridge.ViewError, match="no multiple of the item"):
                bridge.as_torch(records["b"])
