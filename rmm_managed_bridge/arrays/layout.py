"""How an array lies in memory, and whether it may be shared as it is."""

from numbers import Integral
from typing import Any

import numpy as np

from rmm_managed_bridge._native.blocks import Block, KnownArray
from rmm_managed_bridge.arrays.address import Address, address_of, lost_in_fork
from rmm_managed_bridge.arrays.columns import values_of
from rmm_managed_bridge.errors import ViewError
from rmm_managed_bridge.frameworks import registry
from rmm_managed_bridge.frameworks.places import CPU, device_number

_NOT_HOOKED_ON_CPU = {"warp": "Warp", "torch": "PyTorch"}
HOST_ACCESSIBLE = ("host", "managed", "system", "pinned")
DEVICE_ACCESSIBLE = ("managed", "system", "pinned", "device")


def known(x: Any) -> KnownArray:
    """Return an array with all that is known of it.

    Raises
    ------
    ViewError
        If `x` is no array, or is one whose values are not what lies in its memory.
    """
    framework = registry.framework_for(x)
    layout = registry.layout_of(x, framework)
    if layout is None and (values := values_of(x)) is not None:
        # In place of the column: that may come to hold another array while the view lives.
        x, framework = values, registry.framework_for(values)
        layout = registry.layout_of(x, framework)
    if layout is not None:
        return KnownArray(x, framework, *layout)
    address = address_of(x)
    if registry.is_lazy(x):
        raise ViewError(
            f"the memory of this {type(x).__name__} holds its values before conjugation or negation; call "
            "resolve_conj() and resolve_neg() first"
        )
    dtype = dtype_of(x, address)
    return KnownArray(x, framework, address.ptr, address.shape, address.strides, dtype, address.readonly)


def dtype_of(x: Any, address: Address) -> "np.dtype[Any]":
    """Return the dtype of an array, with its fields as far as its interface tells them."""
    if address.dtype is not None:
        return address.dtype
    if isinstance(x, Integral):
        raise ViewError(f"{x} is an address, which has no shape and dtype; pass the array itself")
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


def require_ours(array: KnownArray) -> Block:
    """Return the block that all of the array lies in."""
    block = array.block
    if block is None or not array.within:
        raise ViewError(not_ours(array.source))
    return block


def require_plain(array: KnownArray, consumer: str, *, allow_readonly: bool = False) -> None:
    """Refuse what `consumer` has no types for: what is not `array.plain`."""
    dtype = array.dtype
    if dtype.hasobject:
        raise ViewError(f"{consumer} cannot hold Python objects; dtype {dtype} has them")
    if not dtype.isnative:
        raise ViewError(
            f"{consumer} has no byte-swapped types; convert first: x.astype({dtype.newbyteorder('=').str!r})"
        )
    if array.readonly and not allow_readonly:
        raise ViewError(
            f"this {type(array.source).__name__} is read-only, which {consumer} cannot express: a view would let it be "
            "written; pass allow_readonly=True where the work only reads"
        )


def require_device(array: KnownArray) -> Block:
    """Return the block that all of the array lies in, if a device reaches it."""
    block = require_ours(array)
    if block.kind not in DEVICE_ACCESSIBLE or block.device < 0:
        raise ViewError(
            f"this {type(array.source).__name__} lies in {block.kind} memory, which no device reaches; call "
            "install(backend='managed', initial_pool_size=...) on a machine with a GPU before the array is made"
        )
    return block


def require_host(array: KnownArray) -> None:
    """Refuse memory that the CPU does not reach."""
    block = require_ours(array)
    require_inherited(array)
    if block.kind not in HOST_ACCESSIBLE:
        raise ViewError(
            f"this {type(array.source).__name__} lies in {block.kind} memory, which the CPU cannot reach; use managed "
            "memory, install(backend='managed', ...), or copy it"
        )


def require_inherited(array: KnownArray) -> None:
    """Refuse, in a forked child, memory that stayed with the parent."""
    if (lost := lost_in_fork(array.source, array.low, array.size_bytes)) is not None:
        raise ViewError(lost)


def not_ours(x: Any) -> str:
    """Return why memory from elsewhere cannot be shared."""
    maker = registry.framework_for(x).name
    if maker in _NOT_HOOKED_ON_CPU and device_number(getattr(x, "device", None), "device", "") == CPU:
        return (
            f"this {type(x).__name__} is {_NOT_HOOKED_ON_CPU[maker]}'s own memory of the CPU, which is never the "
            f"bridge's; make the array with NumPy, and take as_{maker}() of it"
        )
    return (
        f"this {type(x).__name__} does not lie in a live block of the bridge, so it cannot be shared without a copy; "
        "make it while the bridge is installed for its framework (see status()), or copy it into an array that is"
    )
