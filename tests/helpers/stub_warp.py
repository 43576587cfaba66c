"""A Warp with devices that are not there: its allocator switch, as the bridge's adapter meets it."""

import sys
import types
from typing import Any

import pytest


class Device:
    """A CUDA device as Warp shows it, on its null stream."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._custom_allocator: Any = None
        self.stream = types.SimpleNamespace(cuda_stream=None)


class Array:
    """An array of Warp, as far as its IPC handle goes."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def ipc_handle(self) -> bytes:
        return b"handle of Warp's own"


class Memory:
    """The memory of one array, from the device's allocator, freed with the last reference to it."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._allocator, self._size_bytes = device._custom_allocator, size_bytes
        self.ptr: int = 0
        self.ptr = self._allocator.allocate(size_bytes)

    def __del__(self) -> None:
        self._allocator.deallocate(self.ptr, self._size_bytes)


class StubWarp(types.ModuleType):
    """The module `warp` with `count` devices. Setting an allocator on a device in `refusing` raises, as Warp does."""

    def __init__(self, count: int, refusing: frozenset[int] = frozenset()) -> None:
        super().__init__("warp")
        self.devices = [Device(number) for number in range(count)]
        self.refusing = set(refusing)
        self.MemoryKind = types.SimpleNamespace(CUDA_MANAGED=object())
        self.array = type("array", (Array,), {})  # one for each stub: the bridge puts a function of its own there

    def is_cuda_available(self) -> bool:
        return bool(self.devices)

    def get_device(self, name: str) -> Device:
        return self.devices[int(name.removeprefix("cuda:"))]

    def alloc(self, size_bytes: int) -> Memory:
        """Allocate as an array of Warp on device 0 does."""
        return Memory(self.devices[0], size_bytes)

    def set_device_allocator(self, device: Device, allocator: Any) -> None:
        if device.number in self.refusing and allocator is not None:
            raise RuntimeError(f"cuda:{device.number} has no driver for custom allocators")
        device._custom_allocator = allocator


def put_in_place(monkeypatch: pytest.MonkeyPatch, count: int, refusing: frozenset[int] = frozenset()) -> StubWarp:
    """Let ``import warp`` find a new stub until the test ends."""
    stub = StubWarp(count, refusing)
    monkeypatch.setitem(sys.modules, "warp", stub)
    return stub
