"""Arrays of another framework over the same bytes.

What a view promises: no byte is copied; the view keeps its source alive; a device view is ordered after the work that
the bridge knows of on the block, and a NumPy view waits for it. What it cannot promise: order against work on a stream
that the bridge never saw. `record_stream` tells it of one.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rmm_managed_bridge import streams
from rmm_managed_bridge._native import blocks, core
from rmm_managed_bridge.access import check_hand_over
from rmm_managed_bridge.address import Address, address_of, extent_of
from rmm_managed_bridge.errors import ViewError
from rmm_managed_bridge.hints import handovers
from rmm_managed_bridge.ipc import guard_torch
from rmm_managed_bridge.layout import dtype_of, not_ours, require_device, require_host, require_ours, require_plain
from rmm_managed_bridge.loans import Loan, hold, lend, note_use

if TYPE_CHECKING:
    import cupy
    import torch
    import warp

_WARP_DIMENSIONS = 4  # its ARRAY_MAX_DIMS


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
    if not blocks.expose(ptr, streams.stream_handle(stream)):
        raise ViewError(not_ours(x))


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
    return np.asarray(_ArrayInterface(x, address, dtype))


def as_cupy(x: Any) -> "cupy.ndarray":
    """Return a CuPy array over the memory of `x`, for use on CuPy's current stream.

    Parameters
    ----------
    x
        A NumPy array, Warp array or other array in memory of the bridge that the device can reach.

    Returns
    -------
    cupy.ndarray
        With the shape, strides and dtype of `x`, on the device of its pool. It does not own its data (``OWNDATA`` is
        False) and keeps `x` alive, by way of its ``.base``.

    Raises
    ------
    ViewError
        A `TypeError` too: if the memory is not the bridge's or no device reaches it; if the array is read-only, which
        CuPy cannot express; if its dtype is byte-swapped or holds Python objects.
    BridgeError
        If CuPy's current stream is being captured.

    Notes
    -----
    Kernels enqueued on the current stream from now on come after the device work on the block so far. Work of the CPU
    needs no order: it is done when this is called. When the block is freed later, it waits for the stream that is
    current now and for the one that is current when the view goes away.

    The hints in use (`using_hints`, `tag`, `install`) are given on the current stream before this returns.
    """
    cupy = _import("cupy")
    check_hand_over(cupy.cuda.Device, x)
    if isinstance(x, cupy.ndarray):
        return x
    address, dtype = _described(x, "CuPy")
    if 0 in address.shape:
        return cupy.empty(address.shape, dtype)
    start, size_bytes = require_ours(x, address, dtype)
    device = require_device(x, address)
    with cupy.cuda.Device(device):
        loan = _lend(x, address, dtype, device, streams.current_cupy_stream)
        memory = cupy.cuda.UnownedMemory(start, size_bytes, loan, device)
        pointer = cupy.cuda.MemoryPointer(memory, address.ptr - start)
        # What CuPy makes from a pointer has no base, and so says that it owns its data; a view of that does not.
        return cupy.ndarray(address.shape, dtype, pointer, strides=address.strides).view()


def as_warp(x: Any) -> "warp.array[Any]":
    """Return a Warp array over the memory of `x`: on the device of its pool, or on the CPU for host memory.

    Parameters
    ----------
    x
        A NumPy or CuPy array, or other array in memory of the bridge, with one dimension or more.

    Returns
    -------
    warp.array
        With the shape and strides of `x` and the matching scalar type. It keeps `x` alive.

    Raises
    ------
    ViewError
        A `TypeError` too: as for `as_cupy`; also for dtypes that Warp has no type for, and for 0-dimensional arrays.

    Notes
    -----
    Order and hints are as for `as_cupy`, on the stream that Warp uses on the device now.
    """
    warp = _import("warp")
    check_hand_over(warp.get_device, x)
    if isinstance(x, warp.array):
        return x
    address, dtype = _described(x, "Warp")
    if address.shape == ():
        raise ViewError("Warp has no arrays without a dimension; pass x.reshape(1)")
    if len(address.shape) > _WARP_DIMENSIONS:
        raise ViewError(f"Warp has arrays of up to {_WARP_DIMENSIONS} dimensions, not {len(address.shape)}")
    try:
        warp_dtype = warp.dtype_from_numpy(dtype)
    except (RuntimeError, TypeError):
        raise ViewError(f"Warp has no type for dtype {dtype}; convert the array first") from None
    if 0 in address.shape:
        # It has no bytes, so no pool: it goes where the pool's arrays would.
        device = max((heap.device for heap in core.heaps() if not heap.retired), default=-1)
        return warp.empty(address.shape, dtype=warp_dtype, device="cpu" if device < 0 else f"cuda:{device}")
    require_ours(x, address, dtype)
    if blocks.kind_of(address.ptr) == "host":
        where, loan = "cpu", Loan(x, address.ptr, None)
    else:
        device = require_device(x, address)
        where, loan = f"cuda:{device}", _lend(x, address, dtype, device, streams.current_warp_stream)
    return warp.array(
        ptr=address.ptr,
        dtype=warp_dtype,
        shape=address.shape,
        strides=address.strides,
        capacity=extent_of(address, dtype.itemsize)[1],
        device=where,
        deleter=loan,
    )


def as_torch(x: Any) -> "torch.Tensor":
    """Return a PyTorch tensor over the memory of `x`: on the device of its pool, or on the CPU for host memory.

    Parameters
    ----------
    x
        A NumPy, CuPy or Warp array, or other array in memory of the bridge.

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
    """
    torch = _import("torch")
    check_hand_over(torch.cuda.current_device, x)
    if isinstance(x, torch.Tensor):
        return x
    address, dtype = _described(x, "PyTorch")
    try:
        empty = torch.from_numpy(np.empty(0, dtype))
    except TypeError:
        raise ViewError(f"PyTorch has no type for dtype {dtype}; convert the array first") from None
    if 0 in address.shape:
        # It has no bytes, so no pool: it goes where the pool's arrays would.
        device = max((heap.device for heap in core.heaps() if not heap.retired), default=-1)
        return torch.empty(address.shape, dtype=empty.dtype, device="cpu" if device < 0 else f"cuda:{device}")
    if any(stride < 0 or stride % dtype.itemsize for stride in address.strides or ()):
        raise ViewError(
            "PyTorch has no negative strides, nor such that are no multiple of the item; copy the array first"
        )
    require_ours(x, address, dtype)
    if blocks.kind_of(address.ptr) == "host":
        return torch.from_numpy(np.asarray(_ArrayInterface(x, address, dtype)))
    device = require_device(x, address)
    guard_torch(torch)
    loan = _lend(x, address, dtype, device, streams.current_torch_stream)
    try:
        tensor = torch.as_tensor(_CudaArrayInterface(loan, address), device=f"cuda:{device}")
    except (RuntimeError, TypeError, ValueError) as error:
        raise ViewError(f"PyTorch does not take this {type(x).__name__} without a copy: {error}") from None
    if tensor.data_ptr() != address.ptr:
        raise ViewError(f"PyTorch made a copy of this {type(x).__name__} instead of a view")
    return tensor


class _CudaArrayInterface:
    """What PyTorch makes a tensor from; the tensor keeps this, and this keeps the loan."""

    def __init__(self, loan: Loan, address: Address) -> None:
        self._loan = loan
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address.ptr, False),
            "shape": address.shape,
            "strides": address.strides,
            "typestr": address.typestr,
        }


def _described(x: Any, consumer: str) -> "tuple[Address, np.dtype[Any]]":
    """Return where and what `x` is, if `consumer` can have such arrays."""
    address = address_of(x)
    dtype = dtype_of(x, address)
    require_plain(x, address, dtype, consumer)
    return address, dtype


def _lend(x: Any, address: Address, dtype: "np.dtype[Any]", device: int, current_stream: Callable[[int], Any]) -> Loan:
    """Order the framework's current stream after the work on the block, and give the hints that are in use there."""
    loan = lend(x, address.ptr, lambda: current_stream(device))
    stream = streams.stream_handle(current_stream(device))
    handovers.to_device(x, *extent_of(address, dtype.itemsize), device, stream)
    return loan


class _ArrayInterface:
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


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ViewError(f"{name} cannot be imported ({error}); install it to get its arrays") from None
