"""The host backend's memory on huge pages, advised where the policy asks; and managed memory as NumPy takes it."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rmm_managed_bridge as bridge
from rmm_managed_bridge import hugepages

MIB = 1 << 20


def flags_of(ptr: int) -> list[str]:
    """Return the kernel's VmFlags of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= ptr < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"{ptr:#x} is not mapped")


@pytest.mark.behaviour("A3")
@pytest.mark.parametrize("advised", [False, True])
def test_slabs_start_on_huge_pages_and_are_advised_only_where_asked(make_heap: Any, advised: bool) -> None:
    heap = make_heap(hugepages=advised)
    ptr = heap.allocate(64 * MIB, cpu=True)
    assert ptr % (2 * MIB) == 0
    assert ("hg" in flags_of(ptr)) is advised
    heap.deallocate(ptr)


@pytest.mark.behaviour("A3")
@pytest.mark.parametrize(
    ("setting", "variable", "advise"),
    [
        ("always [madvise] never", None, True),
        ("always [madvise] never", "0", False),
        ("always [madvise] never", "1", True),
        ("[always] madvise never", None, False),
        ("always madvise [never]", None, False),
        (None, None, False),
    ],
)
def test_advice_follows_the_kernels_setting_and_numpys_switch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str | None, variable: str | None, advise: bool
) -> None:
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting, encoding="ascii")
    monkeypatch.setattr(hugepages, "_SETTING", file)
    monkeypatch.delenv("NUMPY_MADVISE_HUGEPAGE", raising=False)
    if variable is not None:
        monkeypatch.setenv("NUMPY_MADVISE_HUGEPAGE", variable)
    assert hugepages.advise_hugepages() is advise


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
