"""A host pool that passes for the pool of device 0, so that frameworks with devices can be hooked without one."""

import importlib
from typing import Any

import pytest

from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge.config import BridgeConfig
from rmm_managed_bridge.lifecycle.pools import HostPools, RmmPools

# The package's name `install` is the function.
_install = importlib.import_module("rmm_managed_bridge.lifecycle.install")


class OneDevicePools(HostPools):
    """Host pools that say they serve device 0."""

    def __init__(self, config: BridgeConfig, reason: str) -> None:
        super().__init__(config, reason)
        self.by_device: dict[int, Any] = {0: self.cpu_pool}

    def _make(self) -> Any:
        return native_pool.host_pool(settings=self._config.settings_for(1 << 62), track=self._config.track, device=0)

    def renew(self, devices: Any) -> None:
        super().renew(devices)
        self.by_device = {0: self.cpu_pool}


class UnattachedPools(RmmPools):
    """Those of `install`, which RMM is not told of: its current resource is made by the CUDA runtime."""

    def attach(self) -> None:
        pass

    def detach(self) -> list[str]:
        for heap in self.all_pools():
            heap.retire()
        return []


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `install` make such pools until the test ends."""
    monkeypatch.setattr(_install, "_make_pools", lambda config: OneDevicePools(config, "a stub of device 0"))
