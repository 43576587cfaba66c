"""PyTorch."""

import functools
import sys
from typing import Any

import numpy as np

from rmm_managed_bridge.frameworks.layout import Layout


def current_handle(device: int) -> int:
    """Return the handle of PyTorch's current stream on this thread, on a CUDA device."""
    import torch

    # What its compiler calls; to ask for the object takes twenty times as long.
    raw = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device))


def current_stream(device: int) -> Any:
    """Return PyTorch's current stream object on this thread, on a CUDA device."""
    import torch

    return torch.cuda.current_stream(device)


def layout_of(x: Any) -> Layout | None:
    """Return how a tensor lies in memory; None if it cannot be shared as it is, of which its own protocol says why."""
    if not x.is_cuda or x.requires_grad or x.is_sparse or is_lazy(x):
        return None
    dtype = _numpys_dtype(x.dtype)
    if dtype is None:
        return None
    size = dtype.itemsize
    strides = None if x.is_contiguous() else tuple(size * step for step in x.stride())
    return x.data_ptr(), tuple(x.shape), strides, dtype, False


def is_lazy(x: Any) -> bool:
    """Return True for a tensor whose values are not those in its memory: `conj` and its like only note what to do."""
    return bool(x.is_conj() or x.is_neg()) if hasattr(x, "is_conj") else False


@functools.cache
def _numpys_dtype(dtype: Any) -> "np.dtype[Any] | None":
    """Return NumPy's type for one of PyTorch's; None if it has none."""
    try:
        return np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        return None


@functools.lru_cache(maxsize=128)
def own_dtype(torch: Any, dtype: "np.dtype[Any]") -> Any:
    """Return PyTorch's type for one of NumPy's; None if it has none."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        return None


def keeps_stream(stream: Any) -> bool:
    """Return True for PyTorch's own streams, which it never destroys. One from outside has its handle as its id."""
    return int(stream.stream_id) != int(stream.cuda_stream)


def owns_memory(x: Any) -> bool:
    """Return True: nothing tells of a tensor that it is over other memory."""
    return True


def uses_cuda() -> bool:
    """Return True once PyTorch has used CUDA: to ask it for a stream before would start it up."""
    return bool(sys.modules["torch"].cuda.is_initialized())


@functools.cache
def own_streams(device: int) -> dict[int, Any]:
    """Return handle and object of every stream that PyTorch itself makes on a device, but for the default one.

    It makes a fixed number for each priority, hands them out in turn for ever, and destroys none.
    """
    import torch

    found: dict[int, Any] = {}
    for priority in range(-4, 1):  # those that it does not have are mapped to the nearest that it has
        while (stream := torch.cuda.Stream(device=device, priority=priority)).cuda_stream not in found:
            found[stream.cuda_stream] = stream
    return found
