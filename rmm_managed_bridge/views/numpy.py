"""NumPy arrays over memory of the bridge."""

from typing import Any

import numpy as np

from rmm_managed_bridge._native import blocks
from rmm_managed_bridge.arrays.access import check_hand_over
from rmm_managed_bridge.arrays.address import address_of, extent_of
from rmm_managed_bridge.arrays.layout import dtype_of, require_host, require_ours
from rmm_managed_bridge.arrays.stream_use import note_use
from rmm_managed_bridge.hints import handovers
from rmm_managed_bridge.views.common import ArrayInterface


def as_numpy(x: Any) -> "np.ndarray[Any, Any]":
    """Return a NumPy array over the memory of `x`, once the device work on it is finished.

    Parameters
    ----------
    x
        An array of CuPy or Warp, a PyTorch tensor on a device, or anything with ``__cuda_array_interface__``, in memory
        of the bridge that the CPU can reach.

    Returns
    -------
    numpy.ndarray
        With the shape, strides and dtype of `x`. It does not own its data and keeps `x` alive. A NumPy array is
        returned as it is, after the same wait. An array without elements shares nothing: it has no bytes.

    Raises
    ------
    ViewError
        A `TypeError` too: if the memory is not the bridge's, or the CPU cannot reach it.
    BridgeError
        If a stream that the array was used on is being captured: waiting would destroy the capture.

    Notes
    -----
    Waits for the streams that the array was allocated on, shown to, or recorded with `record_stream`, for the stream
    that its framework enqueues on now, and for every other stream whose object the bridge holds; never for the whole
    device, which would destroy captures that the bridge knows nothing of. The GIL is released while it waits.

    With `Hints.device` in use, arrays of 4 MiB and more are prefetched home first, and the wait includes that.
    """
    check_hand_over(lambda: "cpu", x)
    address = address_of(x)
    if isinstance(x, np.ndarray):
        if blocks.block_of(address.ptr) is not None:
            handovers.to_host(x, *extent_of(address, x.dtype.itemsize))
            blocks.synchronize(address.ptr)
        return x
    dtype = dtype_of(x, address)
    if 0 in address.shape:
        return np.empty(address.shape, dtype)
    require_ours(x, address, dtype)
    require_host(x, address)
    note_use(x, address.ptr)
    handovers.to_host(x, *extent_of(address, dtype.itemsize))
    blocks.synchronize(address.ptr)
    return np.asarray(ArrayInterface(x, address, dtype))
