"""What `install` builds a managed pool on, where there is no GPU: all but the driver and the device is real."""

from types import SimpleNamespace
from typing import Any

import pytest
import rmm
from rmm.pylibrmm.memory_resource import DeviceMemoryResource

from rmm_managed_bridge import machine
from rmm_managed_bridge.config import read_config
from rmm_managed_bridge.lifecycle import pools, resource


class Noted:
    """What a `ManagedBridgeResource` was asked for: making one needs the driver."""

    def __init__(self, upstream: DeviceMemoryResource, **options: Any) -> None:
        self.upstream, self.options = upstream, options


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    able = SimpleNamespace(managed_memory=True, concurrent_managed_access=True, pageable_memory_access=False)
    monkeypatch.setattr(machine, "load_driver", lambda: (1, ""))
    monkeypatch.setattr(machine, "device_traits", lambda device: able)
    monkeypatch.setattr("rmm._cuda.gpu.getDevice", lambda: 0)
    monkeypatch.setattr("rmm._cuda.gpu.setDevice", lambda device: None)
    monkeypatch.setattr(resource, "ManagedBridgeResource", Noted)


@pytest.mark.usefixtures("one_device")
def test_given_a_size_the_pool_stands_on_the_driver_and_keeps_at_least_that() -> None:
    """A pool of RMM's between would keep what the bridge's gives back."""
    made = pools.RmmPools(read_config(environment={}, initial_pool_size="2GiB"), "managed", "")
    noted: Any = made.resources[0]
    assert type(noted.upstream) is rmm.mr.ManagedMemoryResource
    assert noted.options["least_budget"] == 2 << 30


@pytest.mark.usefixtures("one_device")
def test_without_one_it_stands_on_what_rmm_has(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = rmm.mr.ManagedMemoryResource()
    monkeypatch.setattr(rmm.mr, "get_per_device_resource", lambda device: theirs)
    made = pools.RmmPools(read_config(environment={}), "managed", "")
    noted: Any = made.resources[0]
    assert noted.upstream is theirs
    assert noted.options["least_budget"] is None
