"""`as_cupy` on a stub of CuPy: layouts, refusals, and what keeps the block: I2, I4, N9."""

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import stub_cupy

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler

MIB = 1 << 20


@pytest.fixture(autouse=True)
def managed(make_heap: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let NumPy here allocate from a host pool that says it is the managed pool of device 0."""
    stub_cupy.put_in_place(monkeypatch)
    heap = make_heap(kind="managed", device=0)
    handler = numpy_handler.NumpyHandler()
    handler.use(heap)
    before = numpy_handler.set_current(handler.capsule)
    yield heap
    numpy_handler.set_current(before)
    handler.use(None)
    gc.collect()


def _grid() -> Any:
    return np.arange(6 * 7, dtype=np.float64).reshape(6, 7)


LAYOUTS: dict[str, Callable[[], Any]] = {
    "c": _grid,
    "transposed": lambda: _grid().T,
    "reversed": lambda: _grid()[::-1, ::-2],
    "0-d": lambda: np.array(5.0),
    "structured": lambda: np.ones(9, [("a", "f4"), ("b", "i8")]),
    "x[1:]": lambda: np.arange(100.0)[1:],
}


@pytest.mark.behaviour("I2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_cupy_keeps_address_shape_strides_and_dtype(layout: str) -> None:
    array = LAYOUTS[layout]()
    view = bridge.as_cupy(array)
    assert (view.data.ptr, view.shape, view.dtype) == (array.ctypes.data, array.shape, array.dtype)
    assert view.__cuda_array_interface__["strides"] in (array.strides, None)
    back = bridge.as_numpy(view)
    assert (back.ctypes.data, back.strides, back.dtype) == (array.ctypes.data, array.strides, array.dtype)
    record = bridge.allocation_of(array)
    assert record is not None
    assert view.data.mem.ptr == record.ptr
    assert view.data.ptr - record.ptr == (8 if layout == "x[1:]" else array.ctypes.data - record.ptr)
    del array, view, back


@pytest.mark.behaviour("I4")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_does_not_own_its_data_and_its_base_holds_the_source(layout: str) -> None:
    array = LAYOUTS[layout]()
    view = bridge.as_cupy(array)
    assert not view.flags.owndata
    assert view.base.data.mem is view.data.mem
    assert view.base.data.mem._owner.source is array
    assert view.view().base is view.base
    del array, view


@pytest.mark.behaviour("I2")
def test_what_cupy_cannot_express_is_refused() -> None:
    read_only = np.ones(10)
    read_only.flags.writeable = False
    for array, reason in (
        (read_only, "read-only"),
        (np.ones(10, ">f4"), "byte-swapped"),
        (np.array([None, 1]), "Python objects"),
    ):
        with pytest.raises(TypeError, match=reason):
            bridge.as_cupy(array)


@pytest.mark.behaviour("I4")
def test_a_view_is_all_that_keeps_the_block(managed: Any) -> None:
    view = bridge.as_cupy(bridge.as_numpy(bridge.as_cupy(np.full(MIB, 7, "u1"))))
    gc.collect()
    assert managed.live_count == 1
    assert bridge.as_numpy(view).sum(dtype=int) == 7 * MIB
    cycle = [view]
    cycle.append(cycle)
    del view, cycle
    gc.collect()
    assert managed.live_count == 0


@pytest.mark.behaviour("N9")
def test_as_cupy_never_aliases_memory_that_is_not_the_pools(tmp_path: Path) -> None:
    array = np.arange(4 * MIB // 8)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(array, 5, buffer_callback=buffers.append)
    file = io.BytesIO()
    np.save(file, array)
    file.seek(0)
    np.save(tmp_path / "array.npy", array)
    found = {
        **{f"protocol {protocol}": pickle.loads(pickle.dumps(array, protocol)) for protocol in (2, 4, 5)},
        "out of band": pickle.loads(stream, buffers=buffers),
        "deepcopy": copy.deepcopy(array),
        "load": np.load(file),
        "memory map": np.load(tmp_path / "array.npy", mmap_mode="c"),
        "frombuffer": np.frombuffer(bytearray(64)),
    }
    shared = {name: each for name, each in found.items() if bridge.owns(each)}
    for name, each in found.items():
        if name in shared:
            assert bridge.as_cupy(each).data.ptr == each.ctypes.data, name
            continue
        with pytest.raises(bridge.ViewError, match="does not lie in a live block"):
            bridge.as_cupy(each)
    assert {"out of band", "deepcopy"} <= shared.keys()
    assert not shared.keys() & {"protocol 5", "memory map", "frombuffer"}
    found.clear()
    shared.clear()
    buffers.clear()
    del array, each, stream
