"""NumPy arrays over memory of the bridge."""

from typing import Any

import numpy as np

from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge.arrays.access import check_hand_over
from rmm_managed_bridge.arrays.layout import known, require_host, require_inherited
from rmm_managed_bridge.arrays.stream_use import bring_home
from rmm_managed_bridge.hints import handovers, policy


def as_numpy(x: Any) -> "np.ndarray[Any, Any]":
    """Return a NumPy array over the memory of `x`, once the device work on it is finished.

    Parameters
    ----------
    x
        An array of CuPy or Warp, a PyTorch tensor on a device, or anything with ``__cuda_array_interface__``, in memory
        of the bridge that the CPU can reach; or a column of pandas, polars or Arrow that is one array, which stays
        read-only where it is.

    Returns
    -------
    numpy.ndarray
        With the shape, strides and dtype of `x`. It does not own its data and keeps `x` alive. A NumPy array is
        returned as it is, after the same wait. An array without elements shares nothing: it has no bytes.

    Raises
    ------
    ViewError
        A `TypeError` too: if the memory is not the bridge's, or the CPU cannot reach it; in a forked child, if it
        stayed with the parent.
    BridgeError
        If a stream that the array was used on is being captured: waiting would destroy the capture.

    Notes
    -----
    Waits for the streams that the array was allocated on, shown to, or recorded with `record_stream`, for the stream
    that its framework enqueues on now, and for every other stream whose object the bridge holds; never for the whole
    device, which would destroy captures that the bridge knows nothing of. The GIL is released while it waits.

    With `Hints.device` in use, arrays of 4 MiB and more are prefetched to host memory first, and the wait includes it.

    Examples
    --------
    >>> field = np.ones(1000, np.float32)
    >>> shared = bridge.as_warp(field)
    >>> shared.fill_(2.0)
    >>> float(bridge.as_numpy(shared).mean())
    2.0
    """
    check_hand_over(lambda: "cpu", x)
    array = known(x)
    if isinstance(x, np.ndarray):
        if array.block is not None:
            require_inherited(array)
            handovers.to_host(array)
            bring_home(array)
        return x
    if array.size_bytes == 0:
        return np.empty(array.shape, array.dtype)
    require_host(array)
    if policy.in_use():
        handovers.to_host(array)
    bring_home(array)
    return numpy_handler.array_over(array.ptr, array.shape, array.strides, array.dtype, array.readonly, array.source)
