"""PyTorch tensors over memory of the bridge."""

from typing import TYPE_CHECKING, Any

from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native.blocks import KnownArray, Loan
from rmm_managed_bridge.arrays.access import check_hand_over
from rmm_managed_bridge.arrays.ipc import guard_torch
from rmm_managed_bridge.arrays.layout import require_device, require_ours
from rmm_managed_bridge.errors import ViewError
from rmm_managed_bridge.frameworks.registry import TORCH
from rmm_managed_bridge.frameworks.torch import own_dtype
from rmm_managed_bridge.views.common import described, import_framework, lend_to

if TYPE_CHECKING:
    import torch


def as_torch(x: Any, *, allow_readonly: bool = False) -> "torch.Tensor":
    """Return a PyTorch tensor over the memory of `x`: on the device of its pool, or on the CPU for host memory.

    Parameters
    ----------
    x
        A NumPy, CuPy or Warp array, or other array in memory of the bridge; or a column, as for `as_cupy`.
    allow_readonly : bool
        As for `as_cupy`.

    Returns
    -------
    torch.Tensor
        With the shape, strides and matching dtype of `x`. It keeps `x` alive. A tensor is returned as it is.

    Raises
    ------
    ViewError
        A `TypeError` too: as for `as_cupy`; also for negative strides, for strides that are no multiple of the item,
        for dtypes that PyTorch has no type for, and for memory that it does not take for CUDA's (that of the
        ``"system"`` backend).

    Notes
    -----
    Order and hints are as for `as_cupy`, on the stream that is PyTorch's current one on the device now. This goes
    through ``__cuda_array_interface__``: PyTorch's DLPack import knows no managed memory.

    Examples
    --------
    >>> from importlib.util import find_spec
    >>> field = np.ones(1000, np.float32)
    >>> if bridge.status().devices and find_spec("torch"):  # on a GPU
    ...     tensor = bridge.as_torch(field)
    ...     tensor *= 2
    """
    torch = import_framework("torch")
    check_hand_over(torch.cuda.current_device, x)
    if isinstance(x, torch.Tensor):
        return x
    array = described(x, "PyTorch", allow_readonly=allow_readonly)
    torch_dtype = own_dtype(torch, array.dtype)
    if torch_dtype is None:
        raise ViewError(f"PyTorch has no type for dtype {array.dtype}; convert the array first")
    if array.size_bytes == 0:
        # It has no bytes, so no pool: it goes where the pool's arrays would.
        device = max((pool.device for pool in native_pool.pools() if not pool.retired), default=-1)
        return torch.empty(array.shape, dtype=torch_dtype, device="cpu" if device < 0 else f"cuda:{device}")
    if any(stride < 0 or stride % array.dtype.itemsize for stride in array.strides or ()):
        raise ViewError(
            "PyTorch has no negative strides, nor such that are no multiple of the item; copy the array first"
        )
    if require_ours(array).kind == "host":
        return torch.from_numpy(
            numpy_handler.array_over(array.ptr, array.shape, array.strides, array.dtype, False, array.source)
        )
    device = require_device(array).device
    guard_torch(torch)
    loan = lend_to(array, device, TORCH)
    try:
        tensor = torch.as_tensor(_CudaArrayInterface(loan, array), device=f"cuda:{device}")
    except (RuntimeError, TypeError, ValueError) as error:
        raise ViewError(f"PyTorch does not take this {type(x).__name__} without a copy: {error}") from None
    if tensor.data_ptr() != array.ptr:
        raise ViewError(f"PyTorch made a copy of this {type(x).__name__} instead of a view")
    return tensor


class _CudaArrayInterface:
    """What PyTorch makes a tensor from; the tensor keeps this, and this keeps the loan."""

    def __init__(self, loan: Loan, array: KnownArray) -> None:
        self._loan = loan
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (array.ptr, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": array.dtype.str,
        }
