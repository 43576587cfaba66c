"""Where the bytes of an array lie, whatever framework it belongs to. Reads no data and waits for nothing."""

import operator
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.arrays.columns import values_of
from rmm_managed_bridge.errors import ViewError
from rmm_managed_bridge.frameworks import registry


class Address(NamedTuple):
    """An array as NumPy would describe it. `ptr` is the address of element 0, which is not always the lowest."""

    ptr: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    typestr: str = ""
    descr: Any = None
    readonly: bool = False
    dtype: "np.dtype[Any] | None" = None
    """Where it is known. Else `typestr` and `descr` tell; if `typestr` is empty, only the address is known."""

    @property
    def itemsize(self) -> int:
        return np.dtype(self.typestr).itemsize if self.dtype is None else self.dtype.itemsize

    @property
    def bare(self) -> bool:
        """True if nothing but the address is known."""
        return self.dtype is None and self.typestr == ""


def address_of(x: Any) -> Address:
    """Return the address, and for arrays the layout, of `x`.

    Raises
    ------
    ViewError
        If `x` is neither an address nor anything that shows one.
    """
    if type(x) is int:
        return Address(x)
    layout = registry.layout_of(x, registry.framework_for(x))
    if layout is not None:
        ptr, shape, strides, dtype, readonly = layout
        return Address(ptr, shape, strides, "", None, readonly, dtype)
    if isinstance(x, (int, Integral)):  # `int` first: to ask for the other costs a microsecond
        return Address(int(x))
    for name in ("__cuda_array_interface__", "__array_interface__"):
        # Some classes have the attribute and raise from it: a torch tensor on the CPU or with a gradient.
        try:
            interface = getattr(x, name, None)
        except (AttributeError, RuntimeError, TypeError):
            interface = None
        if isinstance(interface, dict) and interface.get("data") is not None:
            ptr, readonly = interface["data"]
            strides = interface.get("strides")
            return Address(
                ptr=int(ptr or 0),
                shape=tuple(interface["shape"]),
                strides=None if strides is None else tuple(strides),
                typestr=interface["typestr"],
                descr=interface.get("descr"),
                readonly=bool(readonly),
            )
    for name in ("data_ptr", "ptr"):
        found = getattr(x, name, None)
        if found is not None:
            return Address(int(found() if callable(found) else found))
    values = values_of(x)
    if values is not None:
        return address_of(values)
    try:
        return Address(operator.index(x))
    except TypeError:
        raise ViewError(_no_address(x)) from None


def lost_in_fork(x: Any, ptr: int, size_bytes: int) -> str | None:
    """Return in a forked child that this memory of `x` stayed with the parent, and what to do; None if it did not."""
    if not native_process.lost_in_fork(ptr, size_bytes):
        return None
    return (
        f"this {type(x).__name__} lies in managed memory of the process that this one was forked from, and was not "
        "copied for it: only what NumPy or as_numpy() has is, up to install(fork_limit=...); take as_numpy() of it "
        "before the fork, or start workers with 'spawn' or 'forkserver'"
    )


def _no_address(x: Any) -> str:
    kind = type(x).__name__
    if callable(getattr(x, "to_numpy", None)):
        return f"{kind} object has no address: it holds its arrays inside; pass x.to_numpy(), or one of its columns'"
    if isinstance(x, bytes | bytearray | memoryview):
        return f"{kind} object has no address that Python shows; pass numpy.asarray(x), which lies at the same bytes"
    return (
        f"{kind} object has no address: it is not an array, a buffer with __cuda_array_interface__ or "
        "__array_interface__, nor an integer"
    )


def extent_of(address: Address, itemsize: int | None = None) -> tuple[int, int]:
    """Return the lowest address of an array, and how many bytes it spans from there; 0 for no elements."""
    size = address.itemsize if itemsize is None else itemsize
    if 0 in address.shape:
        return address.ptr, 0
    if address.strides is None:
        for length in address.shape:
            size *= length
        return address.ptr, size
    low = high = address.ptr
    for length, stride in zip(address.shape, address.strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return low, high + size - low


def is_dense(address: Address) -> bool:
    """Return True if every byte of the array's extent belongs to one of its elements."""
    if address.strides is None or 0 in address.shape:
        return True
    size = address.itemsize
    steps = sorted(
        (abs(stride), length) for length, stride in zip(address.shape, address.strides, strict=True) if length > 1
    )
    for stride, length in steps:
        if stride > size:
            return False
        size += (length - 1) * stride
    return True
