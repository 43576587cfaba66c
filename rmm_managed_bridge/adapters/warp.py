"""Warp: an object with `allocate`, `deallocate` and `memory_kind`."""

from typing import Any

from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.arrays.ipc import ExportGuard
from rmm_managed_bridge.errors import FrameworkError
from rmm_managed_bridge.frameworks import registry
from rmm_managed_bridge.hints import handovers, policy

_NO_DEVICE = (
    "Warp takes allocators on CUDA devices only, and there is none here; as_warp() gives CPU arrays over pool memory"
)


class WarpAllocator:
    """Allocates for Warp from the bridge, on the device whose context is current and on Warp's stream there.

    Use it with `warp.set_cuda_allocator`, `warp.set_device_allocator` or `warp.ScopedAllocator`. It may be shared by
    devices and called from any thread.

    Attributes
    ----------
    deallocate_requires_context_guard : bool
        False: a free makes no call that needs the device to be current.
    memory_kind : warp.MemoryKind or None
        What Warp takes the arrays to be; None if it is to ask the driver about each.

    Examples
    --------
    >>> if bridge.status().devices:  # on a GPU
    ...     import warp as wp
    ...     with wp.ScopedAllocator("cuda:0", bridge.warp_allocator):
    ...         x = wp.zeros(1000, device="cuda:0")
    """

    deallocate_requires_context_guard = False

    def __init__(self, pools: dict[int, native_pool.Pool] | None = None) -> None:
        self._pools: dict[int, native_pool.Pool] = dict(pools or {})
        self._devices: dict[int, Any] = {}

    @property
    def memory_kind(self) -> Any:
        import warp

        if {pool.kind for pool in self._pools.values()} == {"managed"}:
            return warp.MemoryKind.CUDA_MANAGED
        return None  # then Warp asks the driver

    def allocate(self, size_in_bytes: int) -> int:
        """Return the address of a block; 0 for no bytes.

        Raises
        ------
        MemoryError
            If the pool has no memory.
        BridgeError
            If Warp's stream is being captured. The capture stays valid.
        FrameworkError
            If no CUDA device is current on this thread.
        """
        number = native_process.current_device()
        if number < 0:
            raise FrameworkError(_NO_DEVICE)
        pool = self._pools.get(number)
        if pool is None or pool.retired:
            pool = self._pools[number] = native_pool.pool_serving(number)
        device = self._devices.get(number)
        if device is None:
            import warp

            device = self._devices[number] = warp.get_device(f"cuda:{number}")
        # None while another thread sets the device up, at its first use. Warp's streams are blocking ones: the legacy
        # stream, which stands in, comes after their work, and they after its.
        stream = device.stream
        handle = 0 if stream is None else stream.cuda_stream or 0
        owner = stream if registry.keeps_stream(stream) else None
        ptr = pool.allocate(size_in_bytes, alignment=256, stream=handle, owner=owner, framework="warp")
        if ptr and policy.wants_to_know(size_in_bytes):
            handovers.allocated(ptr, size_in_bytes, handle)
        return ptr

    def deallocate(self, ptr: int, size_in_bytes: int) -> None:
        """Free a block, after the work on the stream it was allocated on. During shutdown it does nothing."""
        pool = native_pool.any_pool()
        if pool is not None:
            pool.deallocate(ptr, size_in_bytes, framework="warp")

    def __repr__(self) -> str:
        return f"WarpAllocator({', '.join(f'cuda:{number}: {pool!r}' for number, pool in self._pools.items())})"

    def move(self, pools: dict[int, native_pool.Pool]) -> None:
        """From now on allocate from other pools."""
        self._pools = dict(pools)


class WarpAdapter:
    """Hooks Warp's allocator on every device that has a pool."""

    name = "warp"

    def __init__(self, pools: dict[int, native_pool.Pool]) -> None:
        try:
            import warp
        except ImportError as error:
            raise FrameworkError(f"warp cannot be imported ({error}); pip install 'rmm-managed-bridge[warp]'") from None
        if not pools or not warp.is_cuda_available():
            raise FrameworkError(_NO_DEVICE)
        self._warp = warp
        self._allocator = WarpAllocator(pools)
        self._before: dict[int, Any] = {}
        self._exports = ExportGuard(warp.array, "ipc_handle")

    def hook(self) -> None:
        """Set the allocator on each device; undone where one fails."""
        try:
            for number in self._allocator._pools:
                device = self._warp.get_device(f"cuda:{number}")
                # Warp has no public way to ask whether an allocator was set; its own ScopedAllocator reads this too.
                before = device._custom_allocator
                self._warp.set_device_allocator(device, self._allocator)
                self._before[number] = before
        except RuntimeError as error:
            self.unhook()
            raise FrameworkError(f"Warp does not take an allocator: {error}") from None
        self._exports.put()

    def unhook(self) -> str | None:
        """Put back what was set before on each device. Returns what was left, if another allocator was set since."""
        self._exports.take_away()
        kept = []
        for number, before in self._before.items():
            device = self._warp.get_device(f"cuda:{number}")
            if device._custom_allocator is self._allocator:
                self._warp.set_device_allocator(device, before)
            else:
                kept.append(f"cuda:{number}")
        self._before.clear()
        return f"Warp's allocator on {', '.join(kept)} was changed since and was left as it is" if kept else None

    def move(self, pools: dict[int, native_pool.Pool]) -> None:
        """From now on allocate from other pools."""
        self._allocator.move(pools)
