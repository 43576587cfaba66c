"""IPC handles of pool memory through PyTorch, on a stub of it: one clear error, never the driver's: D6.

The other frameworks' are with their adapters.
"""

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import stub_pools, stub_torch

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge.arrays.ipc import ExportGuard

pytestmark = pytest.mark.behaviour("D6")

MIB = 1 << 20


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the stub of PyTorch, which `install` can hook."""
    stub_pools.put_in_place(monkeypatch)
    return stub_torch.put_in_place(monkeypatch)


def refused(storage: Any) -> None:
    """Ask for the IPC handle of a pool block, which stays as it was."""
    with pytest.raises(bridge.AccessError, match=r"no IPC handle(.|\n)*shared_memory"):
        storage._share_cuda_()
    assert bridge.owns(storage)


def others_go_through(torch: Any) -> None:
    """Ask for that of memory which is not the bridge's."""
    assert stub_torch.Tensor(None, 0x5000, (1,), "cuda:0").share(torch) == "handle of 0x5000"


def test_a_tensor_of_the_allocator_is_refused_also_after_uninstall(torch: Any) -> None:
    bridge.install(frameworks=["numpy", "torch"])
    tensor = torch.empty(MIB)
    refused(tensor)
    others_go_through(torch)
    with pytest.warns(bridge.BridgeWarning, match="cannot be changed back"):
        bridge.uninstall()
    refused(tensor)
    others_go_through(torch)


def test_a_tensor_in_a_memory_pool_is_refused(torch: Any, make_heap: Callable[..., Any]) -> None:
    make_heap(device=0)
    with torch.use_mem_pool(bridge.torch_mempool()):
        tensor = torch.empty(MIB)
    refused(tensor)
    others_go_through(torch)
    del tensor


@pytest.mark.parametrize("route", ["as_torch", "another library"])
def test_a_tensor_over_an_array_of_the_pool_is_refused(torch: Any, make_heap: Callable[..., Any], route: str) -> None:
    heap = make_heap(kind="managed", device=0)
    handler = numpy_handler.NumpyHandler()
    handler.use(heap)
    before = numpy_handler.set_current(handler.capsule)
    array = np.ones(MIB, "u1")
    numpy_handler.set_current(before)
    handler.use(None)
    if route == "as_torch":
        view = bridge.as_torch(array)
    else:
        with bridge.installed():  # PyTorch is imported: it need not be hooked
            pass
        view = stub_torch.Tensor(array, array.ctypes.data, array.shape, "cuda:0")
    with pytest.raises(bridge.AccessError, match="CUDA cannot export managed memory"):
        view.share(torch)
    others_go_through(torch)
    del array, view
    gc.collect()


def test_a_pytorch_whose_import_goes_on_is_left_alone(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del torch.UntypedStorage
    assert sys.modules["torch"] is torch
    with bridge.installed():
        assert "cannot be changed back" in bridge.status().frameworks["torch"]


def test_a_function_that_was_inherited_is_inherited_again() -> None:
    class Base:
        def handle(self) -> str:
            return "theirs"

    class Child(Base):
        ptr = 0x5000

    guard = ExportGuard(Child, "handle")
    guard.put()
    assert "handle" in vars(Child)
    assert Child().handle() == "theirs"
    guard.take_away()
    assert "handle" not in vars(Child)
    assert Child().handle() == "theirs"
