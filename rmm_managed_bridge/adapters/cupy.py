"""CuPy: its `CFunctionAllocator` over our native entry points."""

from typing import Any

from rmm_managed_bridge._native import cupy_entry
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge.adapters.cupy_pool import DefaultPoolCall
from rmm_managed_bridge.arrays.ipc import ExportGuard
from rmm_managed_bridge.errors import FrameworkError, InstallError
from rmm_managed_bridge.frameworks import registry
from rmm_managed_bridge.hints import handovers


class CupyAdapter:
    """Hooks CuPy's process-wide allocator. Each block is ordered on the stream that is CuPy's current one."""

    name = "cupy"

    def __init__(self, pools: dict[int, native_pool.Pool]) -> None:
        cupy = _import_cupy()
        if not cupy.cuda.is_available():
            raise FrameworkError("CuPy finds no CUDA device")
        if not pools:
            raise FrameworkError("CuPy works on device memory, and this backend has none")
        self._cupy = cupy
        self._pools = pools
        self._before: Any = None
        self._mine: Any = None
        self._exports = ExportGuard(cupy.cuda.runtime, "ipcGetMemHandle")
        self._default_pool = DefaultPoolCall(cupy)

    def hook(self) -> None:
        """Set the allocator for every device that has a pool."""
        entry, allocator = _allocator()
        for device, pool in self._pools.items():
            entry.use(device, pool)
        self._before = self._cupy.cuda.get_allocator()
        self._mine = allocator.malloc
        try:
            self._cupy.cuda.set_allocator(self._mine)
        except ValueError as error:  # inside `using_allocator`
            raise InstallError(f"CuPy's allocator cannot be set here: {error}") from None
        self._exports.put()
        self._default_pool.put()

    def unhook(self) -> str | None:
        """Put back the allocator that was set before. Returns why not, if another was set since."""
        self._exports.take_away()
        self._default_pool.take_away()
        if self._cupy.cuda.get_allocator() != self._mine:
            return "CuPy's allocator was changed since and was left as it is"
        self._cupy.cuda.set_allocator(self._before)
        # Not above: what was set since may stand on ours.
        entry, _ = _allocator()
        for device in self._pools:
            entry.use(device, None)
        return None

    def move(self, pools: dict[int, native_pool.Pool]) -> None:
        """From now on allocate from other pools."""
        self._pools = pools
        entry, _ = _allocator()
        for device, pool in pools.items():
            entry.use(device, pool)


_entry: cupy_entry.CupyEntry | None = None
_c_allocator: Any = None


def _allocator() -> tuple[cupy_entry.CupyEntry, Any]:
    """Return the one entry and CuPy allocator of this process, made at the first use."""
    global _entry, _c_allocator
    if _entry is None:
        cupy = _import_cupy()
        from cupy_backends.cuda import stream as backend_stream

        entry = cupy_entry.CupyEntry(_ask_stream, _hold_stream, _refuse)
        entry.tell(handovers.allocated)
        # Private, but a Python call for each block costs more than the allocation; its signature is checked.
        capsule = getattr(backend_stream, "__pyx_capi__", {}).get("get_current_stream_ptr")
        if capsule is not None:
            entry.use_stream_function(capsule)
        _c_allocator = cupy.cuda.CFunctionAllocator(*entry.addresses, entry)
        _entry = entry
    return _entry, _c_allocator


def cupy_allocator(size_bytes: int) -> Any:
    """Allocate for CuPy from the bridge: ``cupy.cuda.set_allocator(bridge.cupy_allocator)``.

    Parameters
    ----------
    size_bytes : int
        How many bytes, on CuPy's current device and stream.

    Returns
    -------
    cupy.cuda.MemoryPointer

    Raises
    ------
    cupy.cuda.memory.OutOfMemoryError
        If the pool has no memory.
    InstallError
        If no pool of the bridge serves the current device, or CuPy cannot be imported.

    Examples
    --------
    >>> if bridge.status().devices:  # on a GPU
    ...     import cupy
    ...     cupy.cuda.set_allocator(bridge.cupy_allocator)
    """
    entry, allocator = _allocator()
    import cupy

    device = cupy.cuda.runtime.getDevice()
    if not entry.serves(device):
        entry.use(device, native_pool.pool_serving(device))
    return allocator.malloc(size_bytes)


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise FrameworkError(f"cupy cannot be imported ({error}); pip install 'rmm-managed-bridge[cupy]'") from None
    return cupy


def _ask_stream(device: int) -> int:
    import cupy

    return int(cupy.cuda.get_current_stream(device).ptr)


def _hold_stream(handle: int, device: int) -> None:
    import cupy

    stream = cupy.cuda.get_current_stream(device)
    if int(stream.ptr) != handle or not registry.keeps_stream(stream):
        return
    for pool in native_pool.pools():
        if pool.device == device:
            pool.hold(handle, stream)


def _refuse(handle: int, refusal: int, size_bytes: int, device: int) -> None:
    """Raise what CuPy's users catch, with what the bridge knows."""
    import cupy

    pool = native_pool.pool_serving(device)
    error = native_pool.failure_of(pool, refusal, size_bytes, handle)
    if isinstance(error, MemoryError):
        wrapped = cupy.cuda.memory.OutOfMemoryError(size_bytes, pool.live_bytes)
        wrapped.args = error.args
        raise wrapped
    raise error
