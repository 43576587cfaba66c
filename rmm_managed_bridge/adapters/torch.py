"""PyTorch: its pluggable allocator over our native entry points, for everything or for a `torch.cuda.MemPool`.

PyTorch takes an allocator once, before it first uses CUDA memory, and never gives it up. So what is set here stays for
the life of the process, and only the pools behind it change.
"""

from collections.abc import Mapping
from typing import Any

from rmm_managed_bridge._native import library_path, torch_entry
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.adapters.torch_calls import tell_of_the_bridge
from rmm_managed_bridge.arrays.ipc import guard_torch
from rmm_managed_bridge.errors import FrameworkError
from rmm_managed_bridge.frameworks import torch as frameworks_torch


class TorchAdapter:
    """Makes the bridge PyTorch's allocator: each tensor is one block, and PyTorch keeps nothing back.

    Parameters
    ----------
    pools : dict of int to Pool
        By device.
    resources : mapping of int to ManagedBridgeResource
        What keeps the pools from retiring. They are kept after `unhook`: PyTorch cannot do without.
    """

    name = "torch"

    def __init__(self, pools: dict[int, native_pool.Pool], resources: Mapping[int, Any]) -> None:
        torch = _import_torch()
        if not pools or not torch.cuda.is_available():
            raise FrameworkError(
                "PyTorch takes allocators for CUDA only, and there is no device here; as_torch() gives CPU tensors "
                "over pool memory"
            )
        self._torch = torch
        self._pools = pools
        self._resources = resources

    def hook(self) -> None:
        """Set the allocator, or the pools behind it if it is set already."""
        global _is_current, _kept
        if not _is_current:
            try:
                self._torch.cuda.memory.change_current_allocator(_allocator("bridge_torch_malloc"))
            except RuntimeError as error:
                raise FrameworkError(
                    f"PyTorch has used CUDA memory before, and then its allocator cannot be changed ({error}): install "
                    "the bridge for it before the first tensor on a GPU, or use "
                    "`with torch.cuda.use_mem_pool(bridge.torch_mempool()):`"
                ) from None
            _is_current = True
        serve(self._pools)
        _kept = dict(self._resources)
        guard_torch(self._torch)
        tell_of_the_bridge(self._torch)

    def unhook(self) -> str | None:
        """Leave all as it is, and say so."""
        return (
            "PyTorch's allocator cannot be changed back: its tensors go on coming from this pool, until install() is "
            "called again"
        )

    def move(self, pools: dict[int, native_pool.Pool]) -> None:
        """From now on allocate from other pools."""
        global _kept
        self._pools = pools
        serve(pools)
        _kept = dict(self._resources)


def serve(pools: Mapping[int, native_pool.Pool]) -> None:
    """Let PyTorch's allocator and memory pools, if there are any, allocate from these pools from now on."""
    if _entry is not None:
        for device, pool in pools.items():
            _entry.use(device, pool)


def torch_mempool() -> Any:
    """Return a PyTorch memory pool over the bridge: ``with torch.cuda.use_mem_pool(bridge.torch_mempool()):``.

    PyTorch's caching allocator stands on it as on the driver: it asks for segments of 2 MiB and more, cuts tensors out
    of them, and keeps what is freed until ``torch.cuda.empty_cache()``. The bridge sees the segments.

    Returns
    -------
    torch.cuda.MemPool
        The pool of PyTorch's current device, the same one at each call; it lives as long as the process.

    Raises
    ------
    FrameworkError
        If PyTorch is not there or has no device.
    InstallError
        If no pool of the bridge serves the current device.

    Notes
    -----
    Where the pool of the bridge is exhausted, PyTorch frees what it has cached, tries again, and raises
    `torch.OutOfMemoryError`. A segment that is needed while its stream is being captured is refused with a
    `RuntimeError`: make the tensors before the capture, or let them be cached.

    Examples
    --------
    >>> from importlib.util import find_spec
    >>> if bridge.status().devices and find_spec("torch"):  # on a GPU
    ...     import torch
    ...     with torch.cuda.use_mem_pool(bridge.torch_mempool()):
    ...         weights = torch.zeros(4096, 4096, device="cuda")
    """
    torch = _import_torch()
    if not torch.cuda.is_available():
        raise FrameworkError("PyTorch finds no CUDA device")
    device = int(torch.cuda.current_device())
    entry = _the_entry()
    if not entry.serves(device):
        entry.use(device, native_pool.pool_serving(device))
    if device not in _pools:
        # Kept for ever: PyTorch frees a pool's memory with the pool, whatever tensors are left in it.
        _pools[device] = torch.cuda.MemPool(_allocator("bridge_torch_pool_malloc").allocator())
        guard_torch(torch)
    return _pools[device]


_entry: torch_entry.TorchEntry | None = None
_is_current = False
"""Whether PyTorch has our allocator, which it has for ever then."""
_kept: dict[int, Any] = {}
"""The resources of the pools that PyTorch allocates from, or would go on to after `uninstall`."""
_allocators: dict[str, Any] = {}
"""By the name of their malloc. Kept for ever: blocks are freed through them."""
_pools: dict[int, Any] = {}


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise FrameworkError(f"torch cannot be imported ({error}); install PyTorch with CUDA 13") from None
    return torch


def _the_entry() -> torch_entry.TorchEntry:
    global _entry
    if _entry is None:
        _entry = torch_entry.TorchEntry(_hold_stream)
    return _entry


def _allocator(malloc: str) -> Any:
    entry = _the_entry()
    if malloc not in _allocators:
        memory = _import_torch().cuda.memory
        made = memory.CUDAPluggableAllocator(str(library_path()), malloc, "bridge_torch_free")
        # Not in PyTorch's documentation, and without it Tensor.record_stream would be forgotten in silence.
        made.allocator().set_record_stream_fn(entry.record_stream_address)
        _allocators[malloc] = made
    return _allocators[malloc]


def _hold_stream(handle: int, device: int) -> None:
    """Hold a stream that tensors were made on, if it is one of PyTorch's own and not one that came from outside."""
    if native_process.phase() != "running":
        return
    own = frameworks_torch.own_streams(device).get(handle)
    for pool in native_pool.pools():
        if pool.device == device and own is not None:
            pool.hold(handle, own)
