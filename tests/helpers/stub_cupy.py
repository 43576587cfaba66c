"""A CuPy without a device: its allocator switch, over the bridge's real native entry points.

Behaves as CuPy 14 does where the bridge meets it: one allocator for the process, another for each thread inside
`using_allocator`, where the first cannot be set; memory objects that free themselves; its own out-of-memory class.
"""

import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from rmm_managed_bridge._native.cupy_entry import CupyEntry


class OutOfMemoryError(MemoryError):
    """CuPy's class, with CuPy's constructor."""

    def __init__(self, size_bytes: int, total_bytes: int, limit_bytes: int = 0) -> None:
        super().__init__(f"Out of memory allocating {size_bytes:,} bytes (allocated so far: {total_bytes:,} bytes).")


class MemoryPointer:
    """One block, freed with the last reference to it."""

    def __init__(self, guest: CupyEntry, size_bytes: int, device: int) -> None:
        self._entry = guest
        self._device = device
        self.size_bytes = size_bytes
        self.ptr: int = 0
        self.ptr = guest.malloc(size_bytes, device)

    def __del__(self) -> None:
        self._entry.free(self.ptr, self._device)


class CFunctionAllocator:
    """Takes the entry points as CuPy does, and calls them by way of the object that owns them."""

    def __init__(self, param: int, malloc: int, free: int, owner: CupyEntry) -> None:
        assert (param, malloc, free) == owner.addresses
        self._owner = owner

    def malloc(self, size_bytes: int) -> MemoryPointer:
        return MemoryPointer(self._owner, size_bytes, 0)


class UnownedMemory:
    """Memory of somebody else's, whose owner it keeps."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class OffsetPointer:
    """`cupy.cuda.MemoryPointer`: a place in memory."""

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class ndarray:  # noqa: N801 - CuPy's name
    """An array that knows where it lies."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memptr: OffsetPointer, strides: Any = None) -> None:
        self.shape, self.dtype, self.data = shape, dtype, memptr
        self._strides = strides
        self.base: Any = None
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "descr": dtype.descr,
            "data": (memptr.ptr, False),
            "strides": strides,
        }

    @property
    def flags(self) -> Any:
        """CuPy counts an array without a base as the owner of its data."""
        return types.SimpleNamespace(owndata=self.base is None)

    def view(self) -> "ndarray":
        """Return another array over the same memory, based on this one or on what this one is based on."""
        other = ndarray(self.shape, self.dtype, self.data, self._strides)
        other.base = self if self.base is None else self.base
        return other


class Stream:
    """CuPy's null stream."""

    __module__ = "cupy.cuda.stream"
    ptr = 0


def default_allocator(size_bytes: int) -> Any:
    """CuPy's own pool; nothing here asks it for memory."""
    raise AssertionError(f"CuPy's own pool was asked for {size_bytes} bytes")


ndarray.__module__ = "cupy"  # by which the bridge knows whose stream it is on


def ipc_get_mem_handle(ptr: int) -> bytes:
    """Stand for the driver, which takes what the bridge does not know."""
    return b"handle of CuPy's own"


class MemoryPool:
    """CuPy's own pool: nothing is in it, and it takes note of what it is told."""

    def __init__(self) -> None:
        self.freed = 0
        self.limit = 0

    def free_all_blocks(self, stream: Any = None) -> None:
        self.freed += 1

    def used_bytes(self) -> int:
        return 0

    free_bytes = total_bytes = used_bytes

    def set_limit(self, size: int = 0) -> None:
        self.limit = size

    def get_limit(self) -> int:
        return self.limit


class StubCupy:
    """The module `cupy`, as far as the bridge uses it."""

    def __init__(self) -> None:
        self._allocator: Any = default_allocator
        self._thread = threading.local()
        self.stream = Stream()
        self.own_pool = MemoryPool()
        self.get_default_memory_pool = lambda: self.own_pool
        self.ndarray = ndarray
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,
            get_allocator=self.get_allocator,
            set_allocator=self.set_allocator,
            using_allocator=self.using_allocator,
            get_current_stream=lambda device=0: self.stream,  # which a test may replace
            CFunctionAllocator=CFunctionAllocator,
            Device=lambda device: nullcontext(),
            UnownedMemory=UnownedMemory,
            MemoryPointer=OffsetPointer,
            memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=types.SimpleNamespace(getDevice=lambda: 0, ipcGetMemHandle=ipc_get_mem_handle),
        )

    def get_allocator(self) -> Any:
        mine = getattr(self._thread, "allocator", None)
        return self._allocator if mine is None else mine

    def set_allocator(self, allocator: Any = None) -> None:
        if getattr(self._thread, "allocator", None) is not None:
            raise ValueError("Can't change the global allocator inside `using_allocator` context manager")
        self._allocator = default_allocator if allocator is None else allocator

    @contextmanager
    def using_allocator(self, allocator: Any = None) -> Iterator[None]:
        before = getattr(self._thread, "allocator", None)
        self._thread.allocator = default_allocator if allocator is None else allocator
        try:
            yield
        finally:
            self._thread.allocator = before

    def alloc(self, size_bytes: int) -> Any:
        """Allocate as `cupy.cuda.alloc` does, with the allocator that is current."""
        return self.get_allocator()(size_bytes)


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> StubCupy:
    """Let ``import cupy`` find a new stub until the test ends, and the adapter forget what it made for another one."""
    from rmm_managed_bridge.adapters import cupy as adapter

    stub = StubCupy()
    backend = types.ModuleType("cupy_backends.cuda")
    backend.stream = types.ModuleType("cupy_backends.cuda.stream")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", stub)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cupy.cuda", stub.cuda)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cupy_backends", types.ModuleType("cupy_backends"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda", backend)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.stream", backend.stream)
    monkeypatch.setattr(adapter, "_entry", None)
    monkeypatch.setattr(adapter, "_c_allocator", None)
    return stub
