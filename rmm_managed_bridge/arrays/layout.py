"""How an array lies in memory, and whether it may be shared as it is."""

from typing import Any

import numpy as np

from rmm_managed_bridge._native import blocks
from rmm_managed_bridge.arrays.address import Address, extent_of
from rmm_managed_bridge.errors import ViewError

HOST_ACCESSIBLE = ("host", "managed", "system", "pinned")
DEVICE_ACCESSIBLE = ("managed", "system", "pinned", "device")


def dtype_of(x: Any, address: Address) -> "np.dtype[Any]":
    """Return the dtype of an array, with its fields as far as its interface tells them."""
    if address.typestr == "":
        raise ViewError(
            f"{type(x).__name__} object has an address but does not show shape and dtype; pass an array (for a tensor "
            "that requires gradients, x.detach(); for one on the CPU, x.numpy())"
        )
    if address.typestr[1:2] == "V" and isinstance(x, np.ndarray):
        return np.dtype(x.dtype)
    if address.typestr[1:2] == "V" and address.descr and any(field[0] for field in address.descr):
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(address.descr)
        if dtype.itemsize != int(address.typestr[2:]):
            raise ViewError(f"the fields of this {type(x).__name__} cannot be told from its interface; copy it instead")
        return dtype
    return np.dtype(address.typestr)


def require_ours(x: Any, address: Address, dtype: "np.dtype[Any]") -> tuple[int, int]:
    """Return (start, bytes) of the block that all of the array lies in."""
    low, size_bytes = extent_of(address, dtype.itemsize)
    block = blocks.block_of(low)
    if block is None or low + size_bytes > block[0] + block[1]:
        raise ViewError(not_ours(x))
    return block


def require_plain(x: Any, address: Address, dtype: "np.dtype[Any]", consumer: str) -> None:
    """Refuse what `consumer` has no types for."""
    if dtype.hasobject:
        raise ViewError(f"{consumer} cannot hold Python objects; dtype {dtype} has them")
    if not dtype.isnative:
        raise ViewError(
            f"{consumer} has no byte-swapped types; convert first: x.astype({dtype.newbyteorder('=').str!r})"
        )
    if address.readonly:
        raise ViewError(
            f"this {type(x).__name__} is read-only, which {consumer} cannot express; a view would let it be written"
        )


def require_device(x: Any, address: Address) -> int:
    """Return the device that reaches the array."""
    kind, device = blocks.kind_of(address.ptr), blocks.device_of(address.ptr)
    if kind not in DEVICE_ACCESSIBLE or device is None or device < 0:
        raise ViewError(
            f"this {type(x).__name__} lies in {kind} memory, which no device reaches; call "
            "install(backend='managed', initial_pool_size=...) on a machine with a GPU before the array is made"
        )
    return device


def require_host(x: Any, address: Address) -> None:
    """Refuse memory that the CPU does not reach."""
    kind = blocks.kind_of(address.ptr)
    if kind not in HOST_ACCESSIBLE:
        raise ViewError(
            f"this {type(x).__name__} lies in {kind} memory, which the CPU cannot reach; use managed memory, "
            "install(backend='managed', ...), or copy it"
        )


def not_ours(x: Any) -> str:
    """Return why memory from elsewhere cannot be shared."""
    return (
        f"this {type(x).__name__} does not lie in a live block of the bridge, so it cannot be shared without a copy; "
        "make it while the bridge is installed for its framework (see status()), or copy it into an array that is"
    )
