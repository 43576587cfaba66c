"""The pools of one bridge: one for each device, or one of host memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rmm_managed_bridge import traits
from rmm_managed_bridge._native import core
from rmm_managed_bridge.config import BridgeConfig
from rmm_managed_bridge.errors import BackendError, ConfigError
from rmm_managed_bridge.hugepages import advise_hugepages

if TYPE_CHECKING:
    from rmm.pylibrmm.memory_resource import DeviceMemoryResource

    from rmm_managed_bridge.resource import ManagedBridgeResource


class Pools(Protocol):
    """What `install` needs of a backend."""

    backend: str
    reason: str
    resources: "dict[int, ManagedBridgeResource]"
    """Device number to the RMM resource over its heap."""

    @property
    def heaps(self) -> dict[int, core.Heap]:
        """Device number to heap; empty without devices."""

    @property
    def cpu_heap(self) -> core.Heap:
        """Where NumPy's blocks come from."""

    def attach(self) -> None:
        """Make RMM use the pools."""

    def detach(self) -> list[str]:
        """Make RMM use what it used before and let the pools end with their last blocks; say what was left as it is."""

    def renew(self, devices: Sequence[int]) -> None:
        """Start a new generation: RMM was re-initialised on `devices`, and forgot the others."""

    def reattach(self) -> None:
        """Make RMM use the pools as before: it forgot them in a re-initialisation that failed."""

    def all_heaps(self) -> list[core.Heap]:
        """Every heap of these pools."""


class HostPools:
    """One pool of memory from the kernel. RMM takes no part: without a driver it has no current resource."""

    backend = "host"

    def __init__(self, config: BridgeConfig, reason: str) -> None:
        if config.devices not in (None, "all"):
            raise ConfigError(f"devices={config.devices!r}: the host backend has no devices; leave it out")
        self.reason = reason
        self.heaps: dict[int, core.Heap] = {}
        self.resources: dict[int, ManagedBridgeResource] = {}
        self._config = config
        self.cpu_heap = self._make()

    def _make(self) -> core.Heap:
        return core.host_heap(
            hugepages=advise_hugepages(self._config.hugepages),
            settings=self._config.settings_for(core.memory_bytes(-1)),
            track=self._config.track,
        )

    def attach(self) -> None:
        pass

    def detach(self) -> list[str]:
        self.cpu_heap.retire()
        return []

    def renew(self, devices: Sequence[int]) -> None:
        del devices
        old, self.cpu_heap = self.cpu_heap, self._make()
        old.retire()

    def reattach(self) -> None:
        pass

    def all_heaps(self) -> list[core.Heap]:
        return [self.cpu_heap]


class RmmPools:
    """One `ManagedBridgeResource` for each device, set as RMM's resource there."""

    def __init__(self, config: BridgeConfig, backend: str, reason: str) -> None:
        count, why_not = traits.load_driver()
        if count == 0:
            raise BackendError(f"backend={backend!r} needs a CUDA device: {why_not}; use backend='host'")
        self.backend = backend
        self.reason = reason
        self._config = config
        self.resources: dict[int, ManagedBridgeResource] = {}
        self._before: dict[int, DeviceMemoryResource] = {}
        self._devices = _devices(config, count)
        for device in self._devices:
            self.resources[device] = self._make(device)

    @property
    def heaps(self) -> dict[int, core.Heap]:
        return {device: resource.heap for device, resource in self.resources.items()}

    @property
    def cpu_heap(self) -> core.Heap:
        return self.resources[self._devices[0]].heap

    def _make(self, device: int) -> "ManagedBridgeResource":
        import rmm
        from rmm._cuda.gpu import getDevice, setDevice

        from rmm_managed_bridge.resource import ManagedBridgeResource, bottom_of, kind_of_resource

        able = traits.device_traits(device)
        upstream: DeviceMemoryResource
        before = getDevice()
        setDevice(device)
        try:
            if self.backend == "system":
                if not able.pageable_memory_access:
                    raise BackendError(
                        f"device {device} cannot use memory from the C library (it reports no pageable memory access: "
                        "no HMM or ATS); use backend='managed'"
                    )
                upstream = rmm.mr.SystemMemoryResource()
            elif not able.managed_memory:
                raise BackendError(f"device {device} does not support managed memory; use backend='host'")
            elif self._config.initial_pool_size is not None:
                upstream = rmm.mr.PoolMemoryResource(
                    rmm.mr.ManagedMemoryResource(),
                    initial_pool_size=self._config.initial_pool_size,
                    maximum_pool_size=self._config.maximum_pool_size,
                )
            else:
                upstream = rmm.mr.get_per_device_resource(device)
                if isinstance(upstream, ManagedBridgeResource):
                    return upstream
                kind = kind_of_resource(upstream)
                if kind not in ("managed", "system"):
                    raise BackendError(
                        f"RMM's resource on device {device} is a {type(upstream).__name__} of {kind} memory, which the "
                        "CPU cannot reach; call rmm.reinitialize(pool_allocator=True, managed_memory=True, "
                        "initial_pool_size='2GiB') first, or let the bridge build the pool: "
                        "install(backend='managed', initial_pool_size='2GiB')"
                    )
            if self._config.pool == "off":
                upstream = bottom_of(upstream)
            return ManagedBridgeResource(
                upstream,
                device=device,
                track=self._config.track,
                maximum_pool_size=self._config.maximum_pool_size,
                maximum_quarantine_size=self._config.maximum_quarantine_size,
                release_threshold=self._config.release_threshold,
                pool=self._config.pool,
                ordering=self._config.ordering,
                hugepages=self._config.hugepages,
            )
        finally:
            setDevice(before)

    def attach(self) -> None:
        import rmm

        for device, resource in self.resources.items():
            current = rmm.mr.get_per_device_resource(device)
            if current is not resource:
                self._before[device] = current
                rmm.mr.set_per_device_resource(device, resource)

    def detach(self) -> list[str]:
        import rmm

        complaints = []
        for device, before in self._before.items():
            if rmm.mr.get_per_device_resource(device) is self.resources[device]:
                rmm.mr.set_per_device_resource(device, before)
            else:
                complaints.append(f"RMM's resource on device {device} was changed since and was left as it is")
        self._before.clear()
        # Each resource's heap retires when nobody holds the resource any more; RMM's own references went above.
        self.resources.clear()
        return complaints

    def renew(self, devices: Sequence[int]) -> None:
        import rmm

        for device in devices:
            self._before.pop(device, None)  # RMM let go of it: there is nothing to put back any more
        for device in self._devices:
            if device not in devices:
                # RMM's Python side forgot it; its pool is as it was.
                rmm.mr.set_per_device_resource(device, self.resources[device])
                continue
            before = rmm.mr.get_per_device_resource(device)
            self.resources[device] = self._make_over(device)
            self._before[device] = before
            rmm.mr.set_per_device_resource(device, self.resources[device])

    def reattach(self) -> None:
        import rmm

        for device, resource in self.resources.items():
            rmm.mr.set_per_device_resource(device, resource)

    def _make_over(self, device: int) -> "ManagedBridgeResource":
        """A new resource over what RMM has now, whatever `install` built before."""
        from dataclasses import replace

        config, self._config = self._config, replace(self._config, initial_pool_size=None)
        try:
            return self._make(device)
        finally:
            self._config = config

    def all_heaps(self) -> list[core.Heap]:
        return list(self.heaps.values())


def _devices(config: BridgeConfig, count: int) -> tuple[int, ...]:
    if config.devices == "all":
        return tuple(range(count))
    if config.devices is None:
        from rmm_managed_bridge.resource import current_device

        return (current_device(),)
    for device in config.devices:
        if device >= count:
            raise ConfigError(f"devices={config.devices!r}: device {device} does not exist; there are {count}")
    return config.devices
