"""A PyTorch without a device: its allocator switch and memory pools, over the bridge's real native entry points.

Behaves as PyTorch 2.11 does where the bridge meets it: the allocator can be changed until it was used; functions are
found by name in a library; a free states what malloc was called with; an exception of malloc is a RuntimeError with its
text; a memory pool takes null as out of memory.
"""

import ctypes
import sys
import types
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from rmm_managed_bridge._native.torch_entry import TorchEntry

NOT_OURS = 1 << 20
"""Addresses below stand for memory of PyTorch's own, which the driver exports."""


class OutOfMemoryError(RuntimeError):
    """PyTorch's class."""


class NativeAllocator:
    """What PyTorch makes of the functions' addresses."""

    def __init__(self, malloc: str, free: str) -> None:
        self.malloc, self.free = malloc, free
        self.record_stream_address = 0

    def set_record_stream_fn(self, address: int) -> None:
        self.record_stream_address = address


class CUDAPluggableAllocator:
    """Looks the functions up as PyTorch does."""

    def __init__(self, path: str, malloc: str, free: str) -> None:
        library = ctypes.CDLL(path)
        assert ctypes.cast(getattr(library, malloc), ctypes.c_void_p).value
        assert ctypes.cast(getattr(library, free), ctypes.c_void_p).value
        self._allocator = NativeAllocator(malloc, free)

    def allocator(self) -> NativeAllocator:
        return self._allocator


class MemPool:
    """PyTorch's pool, without its cache."""

    def __init__(self, allocator: NativeAllocator) -> None:
        self.allocator = allocator


class StorageBase:
    """What PyTorch's storages inherit from C."""

    ptr = 0

    def data_ptr(self) -> int:
        return self.ptr

    def _share_cuda_(self) -> str:
        """Ask the driver, which exports what it can."""
        if self.ptr >= NOT_OURS:
            raise RuntimeError("CUDA error: invalid argument")
        return f"handle of {self.ptr:#x}"


class Storage(StorageBase):
    """The memory of one tensor, freed with the last reference to it."""

    _entry: TorchEntry | None = None

    def __init__(self, torch: "StubTorch", size_bytes: int, device: int) -> None:
        assert torch.guest is not None
        self._state = (size_bytes, device, torch.stream)
        self._entry = torch.guest
        pool = torch.pool is not None
        self.ptr = self._entry.malloc(size_bytes, device, torch.stream, pool=pool)
        if pool and self.ptr == 0 and size_bytes:
            raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} bytes")

    def __del__(self) -> None:
        if self.ptr and self._entry is not None:
            self._entry.free(self.ptr, *self._state)


class Tensor:
    """A view over memory of others; it keeps what it was made from."""

    def __init__(self, source: Any, address: int, shape: tuple[int, ...], device: str) -> None:
        self.source, self.address, self.shape, self.device = source, address, shape, device
        self.dtype = getattr(source, "dtype", None)

    def data_ptr(self) -> int:
        return self.address

    def share(self, torch: "StubTorch") -> str:
        """Ask for an IPC handle, as `torch.multiprocessing` does for each tensor that it sends."""
        storage = torch.UntypedStorage.__new__(torch.UntypedStorage)
        storage.ptr = self.address
        return str(storage._share_cuda_())


class Stream:
    """One of the streams that PyTorch hands out in turn, for ever."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.stream_id = handle * 8 + 3


def not_its_own(device: Any = None) -> int:
    """PyTorch's counters, under an allocator that is not its own."""
    raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")


class StubTorch(types.ModuleType):
    """The module `torch`, as far as the bridge uses it."""

    def __init__(self, devices: int) -> None:
        super().__init__("torch")
        self.stream = 0
        self.device = 0
        self.cache_emptied = 0
        self.initialized = False
        self.current: NativeAllocator | None = None
        self.pool: MemPool | None = None
        self.OutOfMemoryError = OutOfMemoryError
        self.Tensor = Tensor
        self.UntypedStorage = type("UntypedStorage", (Storage,), {})  # one for each stub: the bridge changes it
        self.copies = False
        self._given_out = 0
        self.cuda = types.SimpleNamespace(
            is_available=lambda: devices > 0,
            current_device=lambda: self.device,
            MemPool=MemPool,
            Stream=self.give_out_stream,
            current_stream=lambda device: types.SimpleNamespace(cuda_stream=self.stream, stream_id=self.stream),
            empty_cache=self.empty_cache,
            memory_allocated=not_its_own,
            memory_reserved=not_its_own,
            memory=types.SimpleNamespace(
                CUDAPluggableAllocator=CUDAPluggableAllocator, change_current_allocator=self.change_current_allocator
            ),
        )

    def empty_cache(self) -> None:
        self.cache_emptied += 1

    def change_current_allocator(self, allocator: CUDAPluggableAllocator) -> None:
        if self.initialized:
            raise RuntimeError("Can't swap an already initialized allocator")
        self.current = allocator.allocator()

    def give_out_stream(self, device: int, priority: int) -> Stream:
        """Four for the priorities 0 and -1, which the others are mapped to."""
        self._given_out += 1
        return Stream(1000 * (device + 1) + 100 * max(priority, -1) + self._given_out % 4)

    def from_numpy(self, array: Any) -> Tensor:
        if array.dtype.kind not in "biufc":
            raise TypeError(f"can't convert np.ndarray of type {array.dtype}")
        return Tensor(array, array.ctypes.data, array.shape, "cpu")

    def as_tensor(self, source: Any, device: str) -> Tensor:
        interface = source.__cuda_array_interface__
        address = 12345 if self.copies else interface["data"][0]
        return Tensor(source, address, interface["shape"], device)

    @property
    def guest(self) -> TorchEntry | None:
        """Stands for the addresses: what the adapter made."""
        from rmm_managed_bridge.adapters import torch as adapter

        return adapter._entry

    def empty(self, size: Any, device: Any = 0, dtype: Any = None) -> Any:
        """Make a tensor with the allocator or pool that is current, as its storage; by shape, one without elements."""
        if isinstance(size, tuple):
            return Tensor(None, 0, size, device)
        assert self.current is not None or self.pool is not None, "PyTorch's own allocator was asked"
        self.initialized = True
        return self.UntypedStorage(self, size, device)

    def use_mem_pool(self, pool: MemPool) -> AbstractContextManager[None]:
        self.pool = pool
        return nullcontext()


def put_in_place(monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> StubTorch:
    """Let ``import torch`` find a new stub until the test ends, and the adapter forget what it made for another one."""
    from rmm_managed_bridge.adapters import torch as adapter
    from rmm_managed_bridge.frameworks import torch as frameworks_torch

    stub = StubTorch(devices)
    frameworks_torch.own_streams.cache_clear()
    monkeypatch.setitem(sys.modules, "torch", stub)
    for name, fresh in (("_entry", None), ("_is_current", False)):
        monkeypatch.setattr(adapter, name, fresh)
    for name in ("_kept", "_allocators", "_pools"):
        monkeypatch.setattr(adapter, name, {})
    return stub
