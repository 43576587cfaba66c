"""PyTorch's own calls about its memory, on a stub of PyTorch: they tell of the bridge once it is the allocator."""

from typing import Any

import pytest
from helpers import stub_pools, stub_torch

import rmm_managed_bridge as bridge

MIB = 1 << 20

pytestmark = pytest.mark.behaviour("U1")


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the stub of PyTorch, which `install` can hook."""
    stub_pools.put_in_place(monkeypatch)
    return stub_torch.put_in_place(monkeypatch)


def test_counters_answer_by_device_and_the_cache_goes_back(torch: Any) -> None:
    for _ in range(2):
        bridge.install(frameworks=["numpy", "torch"])
        tensor = torch.empty(8 * MIB)
        for device in (None, 0, "cuda", "cuda:0"):
            assert torch.cuda.memory_allocated(device) == torch.cuda.memory.memory_allocated(device) == 8 * MIB
        assert torch.cuda.memory_allocated(1) == torch.cuda.memory_reserved(1) == 0
        assert torch.cuda.memory_reserved() >= 8 * MIB
        del tensor
        assert torch.cuda.memory_allocated() == 0
        reserved, emptied = torch.cuda.memory_reserved(), torch.cache_emptied
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < reserved
        assert torch.cache_emptied == emptied + 1, "once, however often the bridge was installed"
        with pytest.warns(bridge.BridgeWarning, match="cannot be changed back"):
            bridge.uninstall()


def test_they_are_pytorchs_own_while_the_bridge_is_not_its_allocator(torch: Any) -> None:
    with bridge.installed():
        assert torch.cuda.memory_allocated is stub_torch.not_its_own
