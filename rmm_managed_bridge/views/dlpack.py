"""Arrays of the bridge for every library that speaks DLPack."""

from typing import TYPE_CHECKING, Any

import numpy as np

from rmm_managed_bridge._native import dlpack
from rmm_managed_bridge._native.blocks import Loan
from rmm_managed_bridge.arrays.access import check_hand_over
from rmm_managed_bridge.arrays.layout import HOST_ACCESSIBLE, known, require_host, require_ours
from rmm_managed_bridge.arrays.stream_use import bring_home, lend
from rmm_managed_bridge.errors import ViewError
from rmm_managed_bridge.frameworks import registry

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

_CPU = (dlpack.CPU, 0)
_DEVICE_TYPES = {
    "managed": dlpack.CUDA_MANAGED,
    "pinned": dlpack.CUDA_HOST,
    "device": dlpack.CUDA,
}
_LEGACY, _NO_WAIT = 1, -1  # what the protocol calls them


def as_dlpack(x: Any) -> "DLPackArray":
    """Return `x` as an object with ``__dlpack__``, for ``from_dlpack`` of any library, without a copy.

    Parameters
    ----------
    x
        An array of any framework in memory of the bridge: booleans, integers, floating-point or complex numbers.

    Returns
    -------
    DLPackArray
        It and every array made from it keep `x` alive. Managed memory is shown as what it is (DLPack's device type
        13), so that both a CPU and a GPU library may take it: ``cupy.from_dlpack(as_dlpack(numpy_array))``, which CuPy
        refuses for the NumPy array itself, and ``numpy.from_dlpack(as_dlpack(cupy_array))``.

    Raises
    ------
    ViewError
        A `TypeError` too: if the memory is not the bridge's, the array has no elements, or DLPack has no such type.

    Notes
    -----
    When a library takes the array on a stream that is the current one of CuPy, Warp or PyTorch, that stream is ordered
    after the work on the block so far, and the block is not reused before the work on the stream that is current when
    the library lets go of it. A library that names no stream, another one, or the CPU, gets the array once the work so
    far is finished, as for `as_numpy`; what it does on streams of its own afterwards, only `record_stream` tells.

    Examples
    --------
    >>> x = np.ones(1000, np.float32)
    >>> shared = np.from_dlpack(bridge.as_dlpack(x))
    >>> shared[0] = 2.0
    >>> float(x[0])
    2.0
    """
    return DLPackArray(x)


class DLPackArray:
    """What `as_dlpack` returns."""

    def __init__(self, x: Any) -> None:
        array = known(x)
        dtype = array.dtype
        if dtype.kind not in dlpack.CODES or not dtype.isnative:
            raise ViewError(f"DLPack has no type for dtype {dtype}; convert the array first")
        if array.size_bytes == 0:
            raise ViewError("an array without elements has no memory to share; make one with the other library")
        block = require_ours(array)
        strides = array.strides
        if strides is None:
            strides = _c_strides(array.shape, dtype.itemsize)
        if any(stride % dtype.itemsize for stride in strides):
            raise ViewError("DLPack counts strides in elements, and these are no multiples of one; copy the array")
        self._array = array
        self._strides = tuple(stride // dtype.itemsize for stride in strides)
        self._kind = block.kind
        self._device = block.device

    def __repr__(self) -> str:
        where = self._kind if self._device < 0 else f"{self._kind}, cuda:{self._device}"
        return f"<DLPackArray: {self._array.dtype} of shape {self._array.shape} in {where} memory>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray[Any, Any]":
        """Return a NumPy array over the memory, once the work so far is finished, as `as_numpy` does."""
        require_host(self._array)
        return np.array(np.from_dlpack(self), dtype=dtype, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and the device's number."""
        kind = _DEVICE_TYPES.get(self._kind)
        return _CPU if kind is None else (kind, max(self._device, 0))

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> "CapsuleType":
        """Return the tensor, as the protocol has it; see `as_dlpack` for order."""
        device = self.__dlpack_device__() if dl_device is None else tuple(dl_device)
        if copy:
            raise BufferError("this export never copies; copy the array that was imported")
        if device != self.__dlpack_device__() and not (device == _CPU and self._kind in HOST_ACCESSIBLE):
            raise BufferError(f"{self._kind} memory of the bridge cannot be exported to DLPack device {device}")
        versioned = max_version is not None and max_version[0] >= 1
        if self._array.readonly and not versioned:
            raise BufferError("the array is read-only, which only DLPack 1.0 and newer can express")
        # A library that names neither may be one of the CPU, which takes managed memory, too: NumPy does.
        unnamed = stream is None and dl_device is None and self._kind in HOST_ACCESSIBLE
        for_cpu = device[0] == dlpack.CPU or unnamed
        check_hand_over(lambda: "cpu" if for_cpu else device[1], self._array.source)
        return dlpack.capsule(
            self._lend(None if device[0] == dlpack.CPU else stream),
            self._array.ptr,
            self._array.shape,
            self._strides,
            code=dlpack.CODES[self._array.dtype.kind],
            itemsize=self._array.dtype.itemsize,
            device=(device[0], device[1]),
            readonly=self._array.readonly,
            versioned=versioned,
        )

    def _lend(self, stream: int | None) -> Loan:
        current = None if stream is None else self._current_stream(stream)
        if current is not None:
            return lend(self._array, self._device, current)[0]
        if stream != _NO_WAIT:
            bring_home(self._array)
        return Loan(self._array.source, self._array.ptr, -1, None, None)

    def _current_stream(self, stream: int) -> registry.CurrentStream | None:
        """Return how to ask for the current stream of the framework that is on `stream` now."""
        if stream == _NO_WAIT or self._device < 0:
            return None
        handle = registry.LEGACY if stream == _LEGACY else stream
        for current in registry.current_streams():
            if current.handle(self._device) == handle:
                return current
        return None


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for length in reversed(shape):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))
