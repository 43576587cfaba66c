"""Pool memory for every library that speaks DLPack: I1, I2, I3, I4."""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge._native import pool as native_pool

MIB = 1 << 20
CPU, MANAGED = (1, 0), (13, 0)
NEW = {"max_version": (1, 0)}


@pytest.fixture
def managed(make_heap: Any) -> Iterator[Any]:
    """Let this context's NumPy allocate from a host pool that says it is the managed pool of device 0."""
    heap = make_heap(kind="managed", device=0)
    handler = numpy_handler.NumpyHandler()
    handler.use(heap)
    before = numpy_handler.set_current(handler.capsule)
    yield heap
    numpy_handler.set_current(before)
    handler.use(None)
    gc.collect()


@pytest.fixture
def host() -> Iterator[None]:
    with bridge.installed("host", frameworks=["numpy"]):
        yield


@pytest.mark.behaviour("I1")
@pytest.mark.parametrize("arguments", [{}, {"device": "cpu"}, {"device": "cpu", "copy": False}])
def test_numpy_takes_managed_memory_through_dlpack_without_a_copy(managed: Any, arguments: dict[str, Any]) -> None:
    array = np.arange(1 << 18, dtype="f4")
    export = bridge.as_dlpack(array)
    assert export.__dlpack_device__() == MANAGED
    count = bridge.stats().total_count
    view = np.from_dlpack(export, **arguments)
    assert view.ctypes.data == array.ctypes.data
    assert bridge.owns(view) and bridge.stats().total_count == count
    array[7] = -1
    assert view[7] == -1
    view[8] = -2
    assert array[8] == -2
    del array, export, view


@pytest.mark.behaviour("I1")
def test_numpys_own_conversion_gives_the_array_and_not_an_object(managed: Any) -> None:
    array = np.arange(12, dtype="f4").reshape(3, 4)[:, ::2]
    export = bridge.as_dlpack(array)
    view = np.asarray(export)
    assert (view.ctypes.data, view.strides, view.dtype) == (array.ctypes.data, array.strides, array.dtype)
    assert np.array_equal(export, array)
    copied = np.array(export)
    assert copied.ctypes.data != array.ctypes.data
    assert np.asarray(export, dtype="f8").tolist() == array.tolist()
    with pytest.raises(ValueError, match="copy"):
        np.array(export, dtype="f8", copy=False)
    assert repr(export) == "<DLPackArray: float32 of shape (3, 2) in managed, cuda:0 memory>"
    del array, export, view, copied


def test_memory_that_the_cpu_cannot_reach_is_not_converted(make_heap: Any) -> None:
    heap = make_heap(kind="device", device=0)
    ptr = heap.allocate(400)

    class OnDevice:
        __cuda_array_interface__ = {"data": (ptr, False), "shape": (100,), "typestr": "<f4", "version": 3}  # noqa: RUF012

    with pytest.raises(bridge.ViewError, match="the CPU cannot reach"):
        np.asarray(bridge.as_dlpack(OnDevice()))
    heap.deallocate(ptr)


@pytest.mark.behaviour("I1")
def test_host_memory_is_shown_as_the_cpus(host: None) -> None:
    array = np.arange(100)
    export = bridge.as_dlpack(array)
    assert export.__dlpack_device__() == CPU
    assert np.from_dlpack(export).ctypes.data == array.ctypes.data
    del array, export


def _arrays() -> dict[str, Any]:
    grid = np.arange(6 * 7, dtype=np.float64).reshape(6, 7)
    read_only = grid.copy()
    read_only.flags.writeable = False
    return {
        "c": grid,
        "transposed": grid.T,
        "reversed": grid[::-1, ::-2],
        "sliced": grid[1:5:2, 2:],
        "x[1:]": grid.ravel()[1:],
        "0-d": np.array(5.0),
        "read-only": read_only,
        "broadcast": np.broadcast_to(grid[0], (4, 7)),
        **{dtype: np.ones((3, 3), dtype) for dtype in ("?", "i1", "i8", "u2", "f2", "f4", "c8", "c16")},
    }


@pytest.mark.behaviour("I2")
@pytest.mark.parametrize("name", _arrays())
@pytest.mark.parametrize("memory", ["host", "managed"])
def test_layout_dtype_and_flags_are_kept(request: pytest.FixtureRequest, memory: str, name: str) -> None:
    request.getfixturevalue(memory)
    array = _arrays()[name]
    view = np.from_dlpack(bridge.as_dlpack(array))
    assert view.ctypes.data == array.ctypes.data
    assert (view.shape, view.strides, view.dtype) == (array.shape, array.strides, array.dtype)
    assert view.flags.writeable == array.flags.writeable
    assert (view == array).all()
    del array, view


@pytest.mark.behaviour("I2")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: np.ones(9, [("a", "f4")]), "DLPack has no type"),
        (lambda: np.ones(9, ">i4"), "DLPack has no type"),
        (lambda: np.array([None]), "DLPack has no type"),
        (lambda: np.arange(3).astype("M8[s]"), "DLPack has no type"),
        (lambda: np.ones(9, [("a", "u1"), ("b", "f8")])["b"], "multiples"),
        (lambda: np.empty((3, 0)), "without elements"),
        (lambda: np.frombuffer(bytearray(80)), "does not lie in a live block"),
        (lambda: 7, "shape and dtype"),
        (lambda: None, "has no address"),
    ],
)
def test_what_dlpack_cannot_say_is_refused(host: None, make: Any, reason: str) -> None:
    with pytest.raises(bridge.ViewError, match=reason):
        bridge.as_dlpack(make())


@pytest.mark.behaviour("I3")
def test_a_consumer_that_asks_for_what_cannot_be_gets_a_buffer_error(managed: Any) -> None:
    array = np.ones(10)
    export = bridge.as_dlpack(array)
    for arguments in ({"copy": True}, {"dl_device": (2, 0)}, {"dl_device": (13, 1)}, {"dl_device": (1, 1)}):
        with pytest.raises(BufferError):
            export.__dlpack__(**NEW, **arguments)
    array.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        bridge.as_dlpack(array).__dlpack__()
    assert bridge.as_dlpack(array).__dlpack__(**NEW, copy=False) is not None
    del array, export


@pytest.mark.behaviour("I3")
def test_device_memory_is_not_shown_to_the_cpu(make_heap: Any) -> None:
    heap = make_heap(kind="device", device=0)
    ptr = heap.allocate(4096)

    class Interface:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"version": 3, "shape": (4096,), "typestr": "|u1", "data": (ptr, False)}

    export = bridge.as_dlpack(Interface())
    assert export.__dlpack_device__() == (2, 0)
    with pytest.raises(BufferError, match="device memory"):
        np.from_dlpack(export, device="cpu")
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(export)
    heap.deallocate(ptr)


@pytest.mark.behaviour("I4")
@pytest.mark.parametrize("arguments", [NEW, {}])
def test_a_capsule_keeps_the_block_until_it_or_its_array_goes(host: None, arguments: dict[str, Any]) -> None:
    unused = bridge.as_dlpack(np.ones(MIB, "u1")).__dlpack__(**arguments)
    assert bridge.stats().current_count == 1
    del unused
    assert bridge.stats().current_count == 0

    class Wrapped:
        capsule = bridge.as_dlpack(np.full(MIB, 7, "u1")).__dlpack__(**arguments)

        def __dlpack_device__(self) -> tuple[int, int]:
            return CPU

        def __dlpack__(self, **options: Any) -> Any:
            return self.capsule

    wrapped = Wrapped()
    view = np.from_dlpack(wrapped)
    Wrapped.capsule = None
    del wrapped
    gc.collect()
    assert bridge.stats().current_count == 1
    assert view.sum(dtype=int) == 7 * MIB
    assert not view.flags.owndata
    with pytest.raises(ValueError, match="own"):
        view.resize(2 * MIB, refcheck=False)
    cycle = [view]
    cycle.append(cycle)  # type: ignore[arg-type]
    del view, cycle
    gc.collect()
    assert bridge.stats().current_count == 0


@pytest.mark.behaviour("I4")
def test_a_chain_of_exports_keeps_the_block(managed: Any) -> None:
    last = np.full(MIB, 7, "u1")
    for _ in range(3):
        last = np.from_dlpack(bridge.as_dlpack(last))
    gc.collect()
    assert managed.live_count == 1
    assert last.sum(dtype=int) == 7 * MIB
    assert native_pool.pool_containing(last.ctypes.data) is managed
    del last
    assert managed.live_count == 0
