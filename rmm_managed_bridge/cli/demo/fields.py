"""Fields of the demo: one block of the pool each, as every framework sees it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import rmm_managed_bridge as bridge
from rmm_managed_bridge.cli.demo.wave import Field
from rmm_managed_bridge.errors import BridgeError

__all__ = ["SharedField", "make_field"]


@dataclass(frozen=True)
class SharedField:
    """One block of memory and its views; None for a framework that takes no part."""

    maker: str
    """The framework that allocated the block."""
    numpy: Field
    cupy: Any | None = None
    warp: Any | None = None

    def read(self) -> Field:
        """Return the NumPy view once all device work on the block that was enqueued before is done."""
        # Where both are there, CuPy works on Warp's stream, so waiting for that one is enough.
        on_device = self.warp if self.warp is not None else self.cupy
        if on_device is None:
            return self.numpy
        view: Field = bridge.as_numpy(on_device)
        return view

    def addresses(self) -> dict[str, int]:
        """Return where each framework sees the block."""
        seen = {"numpy": int(self.numpy.ctypes.data)}
        if self.cupy is not None:
            seen["cupy"] = int(self.cupy.data.ptr)
        if self.warp is not None:
            seen["warp"] = int(self.warp.ptr)
        return seen

    def require_one_block(self) -> None:
        """Raise unless all views start at the same address, and that is the start of a live block of the pool."""
        seen = self.addresses()
        if len(set(seen.values())) != 1 or int(self.read().ctypes.data) != seen["numpy"]:
            places = ", ".join(f"{framework} {address:#x}" for framework, address in seen.items())
            raise BridgeError(f"a field made by {self.maker} was copied on its way: {places}; this is a bug, report it")
        if bridge.allocation_of(seen["numpy"]) is None:
            raise BridgeError(
                f"a field made by {self.maker} at {seen['numpy']:#x} is not in the bridge's pool; "
                "see what `rmm-bridge info` says about that framework"
            )


def make_field(size: int, maker: str, *, with_cupy: bool, warp_device: str | None) -> SharedField:
    """Let `maker` allocate a `size` x `size` field, and give every framework its view of it.

    Warp's own CPU arrays may lie outside the pool; where they do, NumPy allocates instead.
    """
    shape = (size, size)
    block: Any
    if maker == "cupy":
        import cupy

        block = cupy.empty(shape, np.float32)
    elif maker == "warp":
        import warp

        block = warp.empty(shape, dtype=warp.float32, device=warp_device)
        if bridge.allocation_of(int(block.ptr)) is None:
            maker, block = "numpy", np.empty(shape, np.float32)
    else:
        block = np.empty(shape, np.float32)
    return SharedField(
        maker=maker,
        numpy=bridge.as_numpy(block),
        cupy=bridge.as_cupy(block) if with_cupy else None,
        warp=bridge.as_warp(block) if warp_device is not None else None,
    )
