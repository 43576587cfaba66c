"""What a hint is about: from an array, an address or a range to the bytes in one block of the bridge."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from rmm_managed_bridge import machine
from rmm_managed_bridge._native import blocks, hint_table
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.arrays.address import address_of, extent_of, is_dense
from rmm_managed_bridge.errors import ConfigError, shown
from rmm_managed_bridge.frameworks import registry
from rmm_managed_bridge.hints.results import HintSkip


@dataclass(frozen=True)
class Target:
    """Bytes that a hint is about. `ptr` is the lowest address."""

    source: Any
    ptr: int
    size_bytes: int
    dense: bool
    """No byte between belongs to anything else."""

    @property
    def device(self) -> int:
        """The device of the block's pool."""
        block = blocks.find(self.ptr)
        return -1 if block is None else block.device

    def refusal(self) -> HintSkip | None:
        """Return why no hint can be given on this memory. Asks the driver at most for what the device can do."""
        if native_process.phase() != "running":
            return HintSkip.ENDED
        if self.size_bytes == 0:
            return HintSkip.EMPTY
        block = blocks.find(self.ptr)
        if block is None or self.ptr + self.size_bytes > block.start + block.size_bytes:
            return HintSkip.FOREIGN
        if block.kind == "host":
            return HintSkip.HOST
        if block.kind != "managed" or block.device < 0:
            return HintSkip.NOT_MANAGED
        able = machine.device_traits(block.device)
        return None if able.concurrent_managed_access else HintSkip.NO_CONCURRENT_ACCESS


def targets_of(x: Any) -> tuple[list[Target], bool]:
    """Return what `x` is about, and whether it is a list of several.

    Raises
    ------
    ViewError
        If an element has no address.
    ConfigError
        If it is a tuple of integers that is no pair.
    """
    if isinstance(x, tuple) and len(x) != 2 and x and all(isinstance(each, Integral) for each in x):
        raise ConfigError(
            f"{shown(x)} is neither a pair (address, size_bytes) nor arrays; for several addresses pass a list"
        )
    if isinstance(x, list) or (isinstance(x, tuple) and not _is_range(x)):
        return [target_of(each) for each in x], True
    return [target_of(x)], False


def target_of(x: Any) -> Target:
    """Return what one array, address, or (address, size_bytes) is about. A bare address stands for its whole block."""
    if _is_range(x):
        ptr, size_bytes = (int(each) for each in x)
        if size_bytes < 0:
            raise ConfigError(f"size_bytes={size_bytes}: a range has 0 bytes or more")
        return Target(x, ptr, size_bytes, True)
    address = address_of(x)
    if address.bare:
        start, size_bytes = blocks.block_of(address.ptr) or (address.ptr, 1)
        return Target(x, start, size_bytes, True)
    low, size_bytes = extent_of(address)
    return Target(x, low, size_bytes, is_dense(address))


def user_of(target: Target) -> Any:
    """Return the stream object or handle that the target's framework enqueues on now.

    For NumPy arrays and addresses it is the stream of a framework that may use them: CuPy's current one if CuPy is
    imported, else Warp's, else the legacy stream.
    """
    found = registry.stream_of(target.source, target.device)
    return registry.ambient_stream(target.device) if found is None else found


def state_of(target: Target, stream: int) -> HintSkip | None:
    """Return why no work can be enqueued on the stream now. Asks in a way that harms no capture."""
    state = hint_table.state_of_stream(target.ptr, stream)
    if state == "capturing":
        return HintSkip.CAPTURING
    return HintSkip.BAD_STREAM if state == "unknown" else None


def _is_range(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and all(isinstance(e, Integral) for e in x)
