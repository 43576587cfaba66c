"""Arrays of another framework over the same bytes.

What a view promises: no byte is copied; the view keeps its source alive; a device view is ordered after the work that
the bridge knows of on the block, and a NumPy view waits for it. What it cannot promise: order against work on a stream
that the bridge never saw. `record_stream` tells it of one.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rmm_managed_bridge._native import blocks
from rmm_managed_bridge.arrays import streams
from rmm_managed_bridge.arrays.address import Address, address_of, extent_of
from rmm_managed_bridge.arrays.layout import dtype_of, not_ours, require_plain
from rmm_managed_bridge.arrays.stream_use import Loan, hold, lend
from rmm_managed_bridge.errors import ViewError
from rmm_managed_bridge.hints import handovers


def owns(x: Any) -> bool:
    """Return True if `x`, an array of any framework or an address, lies in a live block of the bridge."""
    return blocks.block_of(address_of(x).ptr) is not None


def record_stream(x: Any, stream: Any) -> None:
    """Tell the bridge that work on `stream` may touch `x`, so that the block is not reused before that work is done.

    Parameters
    ----------
    x
        An array of any framework, or an address inside a block.
    stream
        A stream object of any framework, which the bridge keeps alive as long as it needs it, or a handle, which must
        then outlive the block.

    Raises
    ------
    ViewError
        If `x` is not in a live block of the bridge.
    BridgeError
        If the stream is being captured.
    """
    ptr = address_of(x).ptr
    hold(ptr, stream)
    if not blocks.record_stream(ptr, streams.stream_handle(stream)):
        raise ViewError(not_ours(x))


def described(x: Any, consumer: str) -> "tuple[Address, np.dtype[Any]]":
    """Return where and what `x` is, if `consumer` can have such arrays."""
    address = address_of(x)
    dtype = dtype_of(x, address)
    require_plain(x, address, dtype, consumer)
    return address, dtype


def lend_to(
    x: Any, address: Address, dtype: "np.dtype[Any]", device: int, current_stream: Callable[[int], Any]
) -> Loan:
    """Order the framework's current stream after the work on the block, and give the hints that are in use there."""
    loan = lend(x, address.ptr, lambda: current_stream(device))
    stream = streams.stream_handle(current_stream(device))
    handovers.to_device(x, *extent_of(address, dtype.itemsize), device, stream)
    return loan


class ArrayInterface:
    """What NumPy makes an array from; the array keeps this, and this keeps the source."""

    def __init__(self, source: Any, address: Address, dtype: "np.dtype[Any]") -> None:
        self._source = source
        self.__array_interface__ = {
            "version": 3,
            "data": (address.ptr, address.readonly),
            "shape": address.shape,
            "strides": address.strides,
            "typestr": dtype.str,
            "descr": dtype.descr,
        }


def import_framework(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ViewError(f"{name} cannot be imported ({error}); install it to get its arrays") from None
