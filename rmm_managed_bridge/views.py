"""Arrays of another framework over the same bytes.

What a view promises: no byte is copied; the view keeps its source alive; a device view is ordered after the work that
the bridge knows of on the block, and a NumPy view waits for it. What it cannot promise: order against work on a stream
that the bridge never saw. `record_stream` tells it of one.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from rmm_managed_bridge import streams
from rmm_managed_bridge._native import blocks, core
from rmm_managed_bridge.access import check_hand_over
from rmm_managed_bridge.address import Address, address_of, extent_of
from rmm_managed_bridge.errors import ViewError
from rmm_managed_bridge.hints import handovers
from rmm_managed_bridge.stream_use import hold, note_use

if TYPE_CHECKING:
    import cupy
    import torch
    import warp

_HOST_ACCESSIBLE = ("host", "managed", "system", "pinned")
_WARP_DIMENSIONS = 4  # its ARRAY_MAX_DIMS
_DEVICE_ACCESSIBLE = ("managed", "system", "pinned", "device")


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
        raise ViewError(_not_ours(x))


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
    dtype = _dtype_of(x, address)
    if 0 in address.shape:
        return np.empty(address.shape, dtype)
    _require_ours(x, address, dtype)
    kind = blocks.kind_of(address.ptr)
    if kind not in _HOST_ACCESSIBLE:
        raise ViewError(
            f"this {type(x).__name__} lies in {kind} memory, which the CPU cannot reach; use managed memory, "
            "install(backend='managed', ...), or copy it"
        )
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
        With the shape, strides and dtype of `x`, on the device of its pool. It keeps `x` alive.

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
    address = address_of(x)
    dtype = _dtype_of(x, address)
    _require_plain(x, address, dtype, "CuPy")
    if 0 in address.shape:
        return cupy.empty(address.shape, dtype)
    start, size_bytes = _require_ours(x, address, dtype)
    device = _require_device(x, address)
    with cupy.cuda.Device(device):
        stream = streams.current_cupy_stream()
        note_use(x, address.ptr)
        hold(address.ptr, stream)
        blocks.order(address.ptr, streams.stream_handle(stream))
        handovers.to_device(x, *extent_of(address, dtype.itemsize), device, streams.stream_handle(stream))
        loan = _Loan(x, address.ptr, lambda: streams.current_cupy_stream(device))
        memory = cupy.cuda.UnownedMemory(start, size_bytes, loan, device)
        pointer = cupy.cuda.MemoryPointer(memory, address.ptr - start)
        return cupy.ndarray(address.shape, dtype, pointer, strides=address.strides)


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
    address = address_of(x)
    dtype = _dtype_of(x, address)
    _require_plain(x, address, dtype, "Warp")
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
    _require_ours(x, address, dtype)
    if blocks.kind_of(address.ptr) == "host":
        return warp.array(
            ptr=address.ptr,
            dtype=warp_dtype,
            shape=address.shape,
            strides=address.strides,
            capacity=extent_of(address, dtype.itemsize)[1],
            device="cpu",
            deleter=_Loan(x, address.ptr, None),
        )
    device = _require_device(x, address)
    stream = streams.current_warp_stream(device)
    note_use(x, address.ptr)
    hold(address.ptr, stream)
    blocks.order(address.ptr, streams.stream_handle(stream))
    handovers.to_device(x, *extent_of(address, dtype.itemsize), device, streams.stream_handle(stream))
    return warp.array(
        ptr=address.ptr,
        dtype=warp_dtype,
        shape=address.shape,
        strides=address.strides,
        capacity=extent_of(address, dtype.itemsize)[1],
        device=f"cuda:{device}",
        deleter=_Loan(x, address.ptr, lambda: streams.current_warp_stream(device)),
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
    Order and hints are as for `as_cupy`, on the stream that is PyTorch's current one on the device now. This goes through
    ``__cuda_array_interface__``: PyTorch's DLPack import knows no managed memory.
    """
    torch = _import("torch")
    check_hand_over(torch.cuda.current_device, x)
    if isinstance(x, torch.Tensor):
        return x
    address = address_of(x)
    dtype = _dtype_of(x, address)
    _require_plain(x, address, dtype, "PyTorch")
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
    _require_ours(x, address, dtype)
    if blocks.kind_of(address.ptr) == "host":
        return torch.from_numpy(np.asarray(_ArrayInterface(x, address, dtype)))
    device = _require_device(x, address)
    stream = streams.current_torch_stream(device)
    note_use(x, address.ptr)
    hold(address.ptr, stream)
    blocks.order(address.ptr, streams.stream_handle(stream))
    handovers.to_device(x, *extent_of(address, dtype.itemsize), device, streams.stream_handle(stream))
    loan = _Loan(x, address.ptr, lambda: streams.current_torch_stream(device))
    try:
        tensor = torch.as_tensor(_CudaArrayInterface(loan, address), device=f"cuda:{device}")
    except (RuntimeError, TypeError, ValueError) as error:
        raise ViewError(f"PyTorch does not take this {type(x).__name__} without a copy: {error}") from None
    if tensor.data_ptr() != address.ptr:
        raise ViewError(f"PyTorch made a copy of this {type(x).__name__} instead of a view")
    return tensor


class _CudaArrayInterface:
    """What PyTorch makes a tensor from; the tensor keeps this, and this keeps the loan."""

    def __init__(self, loan: "_Loan", address: Address) -> None:
        self._loan = loan
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address.ptr, False),
            "shape": address.shape,
            "strides": address.strides,
            "typestr": address.typestr,
        }


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


class _Loan:
    """Keeps the source of a device view, and notes when the view goes which stream may still be using it."""

    def __init__(self, source: Any, ptr: int, current_stream: Any) -> None:
        self._source = source
        self._ptr = ptr
        self._current_stream = current_stream

    def __call__(self, ptr: int, size_bytes: int) -> None:
        """Do nothing: Warp's deleter. The bytes belong to the source."""

    def __del__(self) -> None:
        # The source's block may be freed right after this. During shutdown nothing is freed, so nothing need be noted.
        if self._current_stream is None or core.phase() != "running":
            return
        stream = self._current_stream()
        hold(self._ptr, stream)
        blocks.expose(self._ptr, streams.stream_handle(stream))


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ViewError(f"{name} cannot be imported ({error}); install it to get its arrays") from None


def _dtype_of(x: Any, address: Address) -> "np.dtype[Any]":
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


def _require_ours(x: Any, address: Address, dtype: "np.dtype[Any]") -> tuple[int, int]:
    """Return (start, bytes) of the block that all of the array lies in."""
    low, size_bytes = extent_of(address, dtype.itemsize)
    block = blocks.block_of(low)
    if block is None or low + size_bytes > block[0] + block[1]:
        raise ViewError(_not_ours(x))
    return block


def _require_plain(x: Any, address: Address, dtype: "np.dtype[Any]", consumer: str) -> None:
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


def _require_device(x: Any, address: Address) -> int:
    kind, device = blocks.kind_of(address.ptr), blocks.device_of(address.ptr)
    if kind not in _DEVICE_ACCESSIBLE or device is None or device < 0:
        raise ViewError(
            f"this {type(x).__name__} lies in {kind} memory, which no device reaches; call "
            "install(backend='managed', initial_pool_size=...) on a machine with a GPU before the array is made"
        )
    return device


def _not_ours(x: Any) -> str:
    return (
        f"this {type(x).__name__} does not lie in a live block of the bridge, so it cannot be shared without a copy; "
        "make it while the bridge is installed for its framework (see status()), or copy it into an array that is"
    )
