"""The pools of one bridge: one for each device, or one of host memory."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from rmm_managed_bridge import machine, overview
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.config import BridgeConfig
from rmm_managed_bridge.errors import BackendError, ConfigError
from rmm_managed_bridge.machine import advise_hugepages
from rmm_managed_bridge.units import format_bytes

if TYPE_CHECKING:
    from rmm.pylibrmm.memory_resource import DeviceMemoryResource

    from rmm_managed_bridge.lifecycle.resource import ManagedBridgeResource


_EXCLUSIVE_ACCESS = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#gpu-exclusive-access-to-managed-memory"


class Pools(Protocol):
    """What `install` needs of a backend."""

    backend: str
    reason: str
    resources: "dict[int, ManagedBridgeResource]"
    """Device number to the RMM resource over its pool."""

    @property
    def by_device(self) -> dict[int, native_pool.Pool]:
        """Device number to pool; empty without devices."""

    def pool_for_numpy(self, *, asked: bool) -> native_pool.Pool:
        """Where NumPy's blocks come from. `asked`: the user named NumPy."""

    def notice(self, *, numpy_asked: bool) -> str | None:
        """Return what the user should be warned of, if anything."""

    def attach(self) -> None:
        """Make RMM use the pools."""

    def detach(self) -> list[str]:
        """Make RMM use what it used before and let the pools end with their last blocks; say what was left as it is."""

    def renew(self, devices: Sequence[int]) -> None:
        """Start a new generation: RMM was re-initialised on `devices`, and forgot the others."""

    def reattach(self) -> None:
        """Make RMM use the pools as before: it forgot them in a re-initialisation that failed."""

    def all_pools(self) -> list[native_pool.Pool]:
        """Every pool of these pools."""


class HostPools:
    """One pool of memory from the kernel. RMM takes no part: without a driver it has no current resource."""

    backend = "host"

    def __init__(self, config: BridgeConfig, reason: str) -> None:
        if config.devices not in (None, "all"):
            raise ConfigError(f"devices={config.devices!r}: the host backend has no devices; leave it out")
        self.reason = reason
        self.by_device: dict[int, native_pool.Pool] = {}
        self.resources: dict[int, ManagedBridgeResource] = {}
        self._config = config
        self.cpu_pool = self._make()

    def _make(self) -> native_pool.Pool:
        return _host_pool(self._config)

    def pool_for_numpy(self, *, asked: bool) -> native_pool.Pool:
        del asked
        return self.cpu_pool

    def notice(self, *, numpy_asked: bool) -> str | None:
        del numpy_asked
        useless = sorted({"maximum_quarantine_size", "wait_timeout"} & self._config.given)
        if not useless:
            return None
        verb, it = ("have", "them") if len(useless) > 1 else ("has", "it")
        return f"{' and '.join(useless)} {verb} no effect on host: no device work is waited for there; leave {it} out"

    def attach(self) -> None:
        pass

    def detach(self) -> list[str]:
        self.cpu_pool.retire()
        return []

    def renew(self, devices: Sequence[int]) -> None:
        del devices
        old, self.cpu_pool = self.cpu_pool, self._make()
        old.retire()

    def reattach(self) -> None:
        pass

    def all_pools(self) -> list[native_pool.Pool]:
        return [self.cpu_pool]


class RmmPools:
    """One `ManagedBridgeResource` for each device, set as RMM's resource there."""

    def __init__(self, config: BridgeConfig, backend: str, reason: str) -> None:
        count, why_not = machine.load_driver()
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
        self._exclusive = tuple(
            device
            for device in self._devices
            if backend == "managed" and not machine.device_traits(device).concurrent_managed_access
        )
        self._host_pool: native_pool.Pool | None = None

    @property
    def by_device(self) -> dict[int, native_pool.Pool]:
        return {device: resource.pool for device, resource in self.resources.items()}

    def pool_for_numpy(self, *, asked: bool) -> native_pool.Pool:
        # NumPy's arrays may be shown to any device, so the least able one decides.
        if not self._exclusive or asked:
            return self.resources[self._devices[0]].pool
        if self._host_pool is None:
            self._host_pool = _host_pool(self._config)
        return self._host_pool

    def notice(self, *, numpy_asked: bool) -> str | None:
        if not self._exclusive:
            return None
        which = f"device {', '.join(map(str, self._exclusive))}"
        if len(self._devices) > 1:
            which += f" of {', '.join(map(str, self._devices))}"
        numpy = (
            "NumPy was named in `frameworks`, so its arrays lie in managed memory: the process dies if the CPU touches "
            "one while a kernel runs"
            if numpy_asked
            else "NumPy stays on host memory, unless it is named in `frameworks`"
        )
        return (
            f"{which} cannot share managed memory with the CPU while it is busy (no concurrentManagedAccess). {numpy}. "
            f"as_numpy() waits for the whole device. See {_EXCLUSIVE_ACCESS}"
        )

    def _make(self, device: int) -> "ManagedBridgeResource":
        import rmm
        from rmm._cuda.gpu import getDevice, setDevice

        from rmm_managed_bridge.lifecycle.resource import ManagedBridgeResource, bottom_of, kind_of_resource

        able = machine.device_traits(device)
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
                # No pool of RMM's between: that would keep what the bridge's gives back.
                upstream = rmm.mr.ManagedMemoryResource()
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
            if self._config.pool == "debug":
                upstream = bottom_of(upstream)
            return ManagedBridgeResource(
                upstream,
                device=device,
                track=self._config.track,
                maximum_pool_size=self._config.maximum_pool_size,
                maximum_quarantine_size=self._config.maximum_quarantine_size,
                wait_timeout=self._config.wait_timeout,
                release_threshold=self._config.release_threshold,
                retain=self._config.retain,
                populate=self._config.populate,
                least_budget=self._config.initial_pool_size,
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
        if self._host_pool is not None:
            self._host_pool.retire()
        # Each resource's pool retires when nobody holds the resource any more; RMM's own references went above.
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

    def all_pools(self) -> list[native_pool.Pool]:
        return [*self.by_device.values(), *([] if self._host_pool is None else [self._host_pool])]


def _host_pool(config: BridgeConfig) -> native_pool.Pool:
    return native_pool.host_pool(
        hugepages=advise_hugepages(config.hugepages),
        settings=config.settings_for(native_process.allowed_bytes()),
        track=config.track,
    )


def _devices(config: BridgeConfig, count: int) -> tuple[int, ...]:
    if config.devices == "all":
        return tuple(range(count))
    if config.devices is None:
        from rmm_managed_bridge.lifecycle.resource import current_device

        return (current_device(),)
    for device in config.devices:
        if device >= count:
            raise ConfigError(f"devices={config.devices!r}: device {device} does not exist; there are {count}")
    return config.devices


def describe_survivors(pools: Iterable[native_pool.Pool]) -> str | None:
    """Return count, bytes, frameworks and call sites of the live blocks of `pools`; None if there are none."""
    count = sum(pool.live_count for pool in pools)
    if count == 0:
        return None
    size_bytes = sum(pool.live_bytes for pool in pools)
    numbers = {pool.number for pool in pools}
    alive = [
        allocation
        for allocation in overview.snapshot().allocations
        if (pool := native_pool.pool_containing(allocation.ptr)) is not None and pool.number in numbers
    ]
    frameworks = sorted({allocation.framework for allocation in alive})
    sites = list(dict.fromkeys(str(allocation.site) for allocation in alive))
    shown = ", ".join(sites[:5]) + (f" and {len(sites) - 5} more places" if len(sites) > 5 else "")
    made = f", of {', '.join(frameworks)}, made at {shown}" if alive else ""
    noun = "block" if count == 1 else "blocks"
    return (
        f"{count} live {noun}, {format_bytes(size_bytes)}{made}. They stay valid and go back to the old pool when they "
        "are freed"
    )
