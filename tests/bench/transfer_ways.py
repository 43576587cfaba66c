"""The ways of `bench_transfer.py` to get data to a device and back: copies of each framework, and managed memory.

Each way is made for one size and used as: `fill` (the CPU has new data), then `there`, passes on the device, `back`.
All of them hold float32. Only what is built on the bridge is managed memory.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import cupy
import numpy as np

import rmm_managed_bridge as bridge

Result = TypeVar("Result")
ONE_IN_A_PAGE = slice(None, None, 1024)  # of float32: enough to bring every page to whoever reads it


def finish() -> None:
    """Wait for CuPy's stream."""
    cupy.cuda.get_current_stream().synchronize()


class Way:
    """Data on the CPU as `host`, and on the device as `data` once `there` has run."""

    name = ""
    writes_mib = 1 << 20
    """Work that writes is left out above this size: it would take minutes and say nothing new."""
    host: Any

    def __init__(self, count: int) -> None:
        self.data: Any = None
        self.count = count

    def fill(self, value: float) -> None:
        self.host[...] = value

    def there(self) -> None:
        """Let the device have the data. Does not wait."""

    def write_pass(self) -> None:
        """Read and write all of it on the device, once. Does not wait."""
        cupy.multiply(self.data, np.float32(1.5), out=self.data)

    def read_pass(self) -> None:
        """Read all of it on the device, once. Does not wait."""
        self.data.sum()

    def back(self) -> None:
        """Let the CPU have the data, and wait until it can read it."""

    def touch(self) -> float:
        """Read something of every page on the CPU."""
        return float(self.host[ONE_IN_A_PAGE].sum())

    def change(self) -> None:
        """Change something on every page on the CPU."""
        self.host[ONE_IN_A_PAGE] += 1


class Pageable(Way):
    """`cupy.asarray` and `cupy.asnumpy`, from memory as NumPy gives it."""

    name = "cupy.asarray, asnumpy (pageable)"

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.host = np.ones(count, "f4")

    def there(self) -> None:
        self.data = cupy.asarray(self.host)

    def back(self) -> None:
        self.host = cupy.asnumpy(self.data)


class Pinned(Way):
    """The same from pinned memory, into arrays that are there already: what the bus can do."""

    name = "cupy set, get (pinned)"

    def __init__(self, count: int) -> None:
        super().__init__(count)
        memory = cupy.cuda.alloc_pinned_memory(4 * count)
        self.host = np.frombuffer(memory, "f4", count)
        self.data = cupy.empty(count, "f4")

    def there(self) -> None:
        self.data.set(self.host)

    def back(self) -> None:
        self.data.get(out=self.host)
        finish()


class Torch(Way):
    """`tensor.cuda()` and `tensor.cpu()`."""

    name = "torch .cuda(), .cpu()"

    def __init__(self, count: int) -> None:
        import torch

        super().__init__(count)
        self._torch = torch
        self.host = np.ones(count, "f4")

    def there(self) -> None:
        self.data = self._torch.from_numpy(self.host).cuda()

    def write_pass(self) -> None:
        self.data.mul_(1.5)

    def read_pass(self) -> None:
        self.data.sum()

    def back(self) -> None:
        self.host = self.data.cpu().numpy()


class Warp(Way):
    """`wp.copy` between arrays that are there already."""

    name = "wp.copy"

    def __init__(self, count: int) -> None:
        import warp

        super().__init__(count)
        self._warp = warp
        self.host = np.ones(count, "f4")
        self._host = warp.array(self.host, dtype=warp.float32, device="cpu", copy=False)
        self._data = warp.empty(count, dtype=warp.float32, device="cuda:0")

    def there(self) -> None:
        self._warp.copy(self._data, self._host)
        self._warp.synchronize()
        self.data = cupy.asarray(self._data)

    def back(self) -> None:
        finish()
        self._warp.copy(self._host, self._data)
        self._warp.synchronize()


class Managed(Way):
    """One array for both, under hints; nothing is copied."""

    hints = "none"

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.host = np.empty(count, "f4")
        assert bridge.owns(self.host)

    def there(self) -> None:
        with bridge.using_hints(self.hints):
            self.data = bridge.as_cupy(self.host)

    def back(self) -> None:
        with bridge.using_hints(self.hints):
            bridge.as_numpy(self.data)


class Faults(Managed):
    name = "bridge, no hints (page faults)"


class DeviceHints(Managed):
    name, hints = "bridge, Hints.device", "device"


class HostHints(Managed):
    name, hints = "bridge, Hints.host", "host"


class ReadMostlyHints(Managed):
    name, hints = "bridge, Hints.read_mostly", "read_mostly"
    writes_mib = 64  # each write to a page ends its copies, at less than 1 GB/s


COPIES: list[type[Way]] = [Pageable, Pinned, Warp, Torch]
MANAGED: list[type[Way]] = [Faults, DeviceHints, HostHints, ReadMostlyHints]


def run_on(kind: type[Way], count: int, work: Callable[[Way], Result]) -> Result | None:
    """Return what `work` gives for this way, or None where its framework is missing; give the memory back."""
    try:
        return work(kind(count))
    except ImportError:
        return None
    finally:
        finish()
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()
        bridge.trim()
        bridge.trim()  # what was waiting for the device at the first look
