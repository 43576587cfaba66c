"""Warp arrays over memory of the bridge."""

from typing import TYPE_CHECKING, Any

from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge.arrays.access import check_hand_over
from rmm_managed_bridge.arrays.layout import require_device, require_ours
from rmm_managed_bridge.errors import ViewError, shown
from rmm_managed_bridge.frameworks.registry import WARP
from rmm_managed_bridge.frameworks.warp import device_object
from rmm_managed_bridge.views.common import described, import_framework, lend_to

if TYPE_CHECKING:
    import warp

_WARP_DIMENSIONS = 4  # its ARRAY_MAX_DIMS


def as_warp(x: Any, dtype: Any = None, *, allow_readonly: bool = False) -> "warp.array[Any]":
    """Return a Warp array over the memory of `x`: on the device of its pool, or on the CPU for host memory.

    Parameters
    ----------
    x
        A NumPy or CuPy array, or other array in memory of the bridge, with one dimension or more; or a column, as
        for `as_cupy`.
    dtype : optional
        A Warp type to see the same bytes as: ``wp.vec3`` for ``float32`` of shape (n, 3), whose last dimension it then
        takes in. The same as ``as_warp(x).view(wp.vec3)``. By default the scalar type of `x`.
    allow_readonly : bool
        As for `as_cupy`.

    Returns
    -------
    warp.array
        With the shape and strides of `x` and the matching scalar type, or `dtype`. It keeps `x` alive.

    Raises
    ------
    ViewError
        A `TypeError` too: as for `as_cupy`; also for dtypes that Warp has no type for, for 0-dimensional arrays,
        and where the bytes of `x` are no whole elements of `dtype`.

    Notes
    -----
    Order and hints are as for `as_cupy`, on the stream that Warp uses on the device now.

    Examples
    --------
    >>> import warp as wp
    >>> points = np.ones((1000, 3), np.float32)
    >>> bridge.as_warp(points).shape
    (1000, 3)
    >>> bridge.as_warp(points, dtype=wp.vec3).shape
    (1000,)
    """
    warp = import_framework("warp")
    check_hand_over(warp.get_device, x)
    if isinstance(x, warp.array):
        return x if dtype is None else _seen_as(x, dtype)
    array = described(x, "Warp", allow_readonly=allow_readonly)
    if array.shape == ():
        raise ViewError("Warp has no arrays without a dimension; pass x.reshape(1)")
    if len(array.shape) > _WARP_DIMENSIONS:
        raise ViewError(f"Warp has arrays of up to {_WARP_DIMENSIONS} dimensions, not {len(array.shape)}")
    try:
        warp_dtype = warp.dtype_from_numpy(array.dtype)
    except (RuntimeError, TypeError):
        raise ViewError(f"Warp has no type for dtype {array.dtype}; convert the array first") from None
    if array.size_bytes == 0:
        # It has no bytes, so no pool: it goes where the pool's arrays would.
        device = max((pool.device for pool in native_pool.pools() if not pool.retired), default=-1)
        empty = warp.empty(array.shape, dtype=warp_dtype, device="cpu" if device < 0 else f"cuda:{device}")
        return empty if dtype is None else _seen_as(empty, dtype)
    loan: Any = array.source
    if require_ours(array).kind == "host":
        where = warp.get_device("cpu")
    else:
        device = require_device(array).device
        where, loan = device_object(device), lend_to(array, device, WARP)
    if array.strides is None:
        view = warp.array(ptr=array.ptr, dtype=warp_dtype, shape=array.shape, device=where)
    else:
        view = warp.array(
            ptr=array.ptr,
            dtype=warp_dtype,
            shape=array.shape,
            strides=array.strides,
            capacity=array.size_bytes,
            device=where,
        )
    # Not as its deleter, which Warp calls in the device's context: that takes longer than all else here. What Warp
    # makes from the view keeps the view.
    view._bridge_loan = loan
    return view if dtype is None else _seen_as(view, dtype)


def _seen_as(view: Any, dtype: Any) -> Any:
    """Return a Warp array over the bytes of another one, which it keeps."""
    try:
        return view.view(dtype)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ViewError(
            f"an array of shape {view.shape}, {view.dtype.__name__}, is none of {shown(dtype)}: {error}"
        ) from None
