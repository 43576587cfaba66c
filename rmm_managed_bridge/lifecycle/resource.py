"""ManagedBridgeResource: what users construct and set in RMM."""

import weakref
from typing import Self

import rmm
from rmm.pylibrmm.memory_resource import DeviceMemoryResource

from rmm_managed_bridge import machine
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.config import read_config
from rmm_managed_bridge.errors import BackendError, ConfigError, shown
from rmm_managed_bridge.lifecycle import forks
from rmm_managed_bridge.lifecycle.call_site_filter import ensure_file_rules
from rmm_managed_bridge.machine import advise_hugepages

# The order matters: `import rmm` loads librmm.so, which this module is linked to by name.
from rmm_managed_bridge._native.rmm_resource import NativeBridgeResource  # isort: skip

SUPPORTED_RMM = "26.10"
_KIND_OF_BOTTOM = {
    "ManagedMemoryResource": "managed",
    "SystemMemoryResource": "system",
    "SamHeadroomMemoryResource": "system",
    "PinnedHostMemoryResource": "pinned",
}


def check_rmm_version() -> None:
    """Raise `BackendError` unless RMM is the release that the native part was built for."""
    if rmm.__version__.split(".")[:2] != SUPPORTED_RMM.split("."):
        raise BackendError(
            f"RMM {rmm.__version__} is installed; this build works with {SUPPORTED_RMM} only, whose C++ symbols it was "
            f"linked to: pip install 'rmm-cu13=={SUPPORTED_RMM}.*'"
        )


def bottom_of(resource: DeviceMemoryResource) -> DeviceMemoryResource:
    """Return the resource at the bottom of a stack of adaptors and pools."""
    while (upstream := getattr(resource, "upstream_mr", None)) is not None:
        resource = upstream
    return resource


def kind_of_resource(resource: DeviceMemoryResource) -> str:
    """Return the memory kind that a stack of resources gives: by the type at its bottom, as far as RMM tells it."""
    bottom = bottom_of(resource)
    for known, kind in _KIND_OF_BOTTOM.items():
        if isinstance(bottom, getattr(rmm.mr, known)):
            return kind
    # Callbacks may give anything; without a driver it can only be host memory.
    return "device" if machine.load_driver()[0] else "host"


class ManagedBridgeResource(NativeBridgeResource):
    """An RMM memory resource that pools what it takes from `upstream_mr` and records every allocation.

    It can be set with `rmm.mr.set_per_device_resource`, and stand under or over other resources. Blocks go back to the
    pool they came from whatever is set by then, and the pool lives until its last block is gone, also after the
    resource itself.

    Parameters
    ----------
    upstream_mr : rmm.mr.DeviceMemoryResource
        Where memory comes from, in pieces of 64 MiB or more, always on a stream of the bridge's own.
    device : int, optional
        The device whose streams the blocks are used on; the current one by default.
    track : {"sites", "counters", "off"}
        What is recorded for each allocation: everything; all but the call site; nothing.
    maximum_pool_size : int or str, optional
        The most that is taken from upstream at any time, in bytes or as text such as ``"2GiB"``; by default the memory
        of the machine and of its devices together.
    maximum_quarantine_size, wait_timeout, release_threshold, retain, pool, ordering
        As for `install`. With ``pool="debug"`` each block is a piece of `upstream_mr` of its own, so that should be no
        pool.
    least_budget : int or str, optional
        With ``retain="budget"``, so much may be kept whatever the program used lately: what `initial_pool_size` is to
        `install`.
    populate : bool
        Whether managed memory that no block has had before is prefetched to the device, as for `install`.
    hugepages : {"auto", "always", "never"}
        Whether large blocks of system memory are advised to use huge pages, as for `install`.

    Attributes
    ----------
    upstream_mr : rmm.mr.DeviceMemoryResource
    kind : str
        ``"managed"``, ``"system"``, ``"pinned"``, ``"host"`` or ``"device"``.

    Raises
    ------
    ConfigError
        If an argument is not what it may be.
    BackendError
        If RMM is another release than the one that the native part was built for.

    Notes
    -----
    Threads: all methods may be called from any thread. C++ code that calls the resource without the GIL is recorded
    with the call site of the Python code that called it, and without a tag.

    Streams: a block is safe for work enqueued on the stream it was allocated on, from then on. It goes back in the
    order of the stream that `deallocate` names. Under ``install(hints="device")`` new blocks of managed memory are
    prefetched on that stream; hints of contexts and tags are not seen here.

    Examples
    --------
    >>> import rmm
    >>> if bridge.status().devices:  # streams are a device's
    ...     pool = bridge.ManagedBridgeResource(rmm.mr.ManagedMemoryResource(), maximum_pool_size="64MiB")
    ...     rmm.mr.set_per_device_resource(0, pool)
    """

    def __new__(
        cls,
        upstream_mr: DeviceMemoryResource,
        *,
        device: int | None = None,
        track: str = "sites",
        maximum_pool_size: int | str | None = None,
        maximum_quarantine_size: int | float | str | None = None,
        wait_timeout: float = 60.0,
        release_threshold: int | float | str | None = None,
        retain: str = "budget",
        pool: str = "on",
        ordering: str = "cautious",
        hugepages: str = "auto",
        least_budget: int | str | None = None,
        populate: bool = True,
    ) -> Self:
        if not isinstance(upstream_mr, DeviceMemoryResource):
            raise ConfigError(
                f"upstream_mr is {shown(upstream_mr)}, not an RMM memory resource; pass for example "
                "rmm.mr.PoolMemoryResource(rmm.mr.ManagedMemoryResource(), initial_pool_size=2**30)"
            )
        stack: DeviceMemoryResource | None = upstream_mr
        while stack is not None:
            if isinstance(stack, NativeBridgeResource):
                raise ConfigError(
                    f"upstream_mr stands on {stack!r}, which pools and records already; use that one, or pass what it "
                    "stands on (its upstream_mr)"
                )
            populate = populate and not isinstance(stack, rmm.mr.PrefetchResourceAdaptor)  # which does so on its own
            stack = getattr(stack, "upstream_mr", None)
        ensure_file_rules()
        # The environment is for `install`: what is constructed has what it was given.
        config = read_config(
            track=track,
            maximum_pool_size=maximum_pool_size,
            maximum_quarantine_size=maximum_quarantine_size,
            wait_timeout=wait_timeout,
            release_threshold=release_threshold,
            retain=retain,
            populate=populate,
            initial_pool_size=least_budget,
            pool=pool,
            ordering=ordering,
            hugepages=hugepages,
            environment={},
        )
        check_rmm_version()
        devices, _ = machine.load_driver()
        if devices == 0:
            device = -1
        elif device is None:
            device = current_device()
        elif not 0 <= device < devices:
            raise ConfigError(f"device={device} does not exist; there are {devices}")
        kind = kind_of_resource(upstream_mr)
        resource = super().__new__(
            cls,
            upstream_mr,
            ordered=devices > 0,
            device=device,
            settings=config.settings_for(native_process.memory_bytes(device)),
            kind=kind,
            track=track,
            hugepages=kind == "system" and advise_hugepages(config.hugepages),
            concurrent=kind != "managed" or device < 0 or machine.device_traits(device).concurrent_managed_access,
        )
        forks.watch()
        weakref.finalize(resource, native_pool.Pool.retire, resource.pool).atexit = False
        return resource

    @property
    def kind(self) -> str:
        return self.pool.kind

    @property
    def device(self) -> int:
        return self.pool.device


def current_device() -> int:
    """Return the CUDA device that is current on this thread."""
    from rmm._cuda.gpu import getDevice

    return int(getDevice())
