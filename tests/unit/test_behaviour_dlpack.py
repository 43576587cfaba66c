"""Managed memory through DLPack, as NumPy takes it: I1."""

import ctypes
from typing import Any

import numpy as np
import pytest

import rmm_managed_bridge as bridge


class Managed:
    """Shows pool memory as CUDA managed memory (DLPack device type 13), as CuPy does for such arrays."""

    def __init__(self, array: "np.ndarray[Any, Any]") -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 13, 0

    def __dlpack__(self, **options: Any) -> Any:
        del options
        capsule = self._array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        tensor = pointer(capsule, b"dltensor")
        # DLTensor: void* data, then DLDevice { int32 type; int32 id }.
        ctypes.c_int32.from_address(tensor + 8).value = 13
        return capsule


@pytest.mark.behaviour("I1")
def test_numpy_takes_managed_memory_through_dlpack_without_a_copy() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        array = np.arange(1 << 18, dtype="f4")
        count = bridge.stats().current_count
        view = np.from_dlpack(Managed(array))
        assert view.ctypes.data == array.ctypes.data
        assert bridge.owns(view) and bridge.stats().current_count == count
        array[7] = -1
        assert view[7] == -1
        del view, array
