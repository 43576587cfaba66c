"""Views without a copy on host memory: I1, I2, I3, I4."""

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.programs import CHeapBlock, must_succeed, run_python

import rmm_managed_bridge as bridge

MIB = 1 << 20


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with bridge.installed("host", frameworks=["numpy"]):
        yield


@pytest.fixture(scope="module")
def warp() -> Any:
    """Return Warp, quiet. The marker skips the test first where there is none."""
    import warp

    warp.config.quiet = True
    warp.init()
    return warp


class Interface:
    """Any object with `__array_interface__`, over the bytes of an array that it keeps."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | changes


@pytest.mark.behaviour("I1")
@pytest.mark.requires("warp")
def test_numpy_and_warp_share_one_block(warp: Any) -> None:
    source = np.zeros(MIB // 4, np.float32)
    before = bridge.stats().total_count
    in_warp = bridge.as_warp(source)
    again = bridge.as_numpy(in_warp)
    assert bridge.stats().total_count == before
    assert (in_warp.ptr, again.ctypes.data) == (source.ctypes.data, source.ctypes.data)
    assert (in_warp.shape, in_warp.dtype, str(in_warp.device)) == ((MIB // 4,), warp.float32, "cpu")
    source[0] = 1
    assert again[0] == 1
    in_warp.fill_(2.0)
    assert (source == 2).all()
    again[-1] = 3
    assert in_warp.numpy()[-1] == 3
    assert all(map(bridge.owns, (source, in_warp, again)))
    assert bridge.allocation_of(in_warp) == bridge.allocation_of(source)


@pytest.mark.behaviour("I1")
@pytest.mark.requires("warp")
def test_a_warp_kernel_works_on_a_numpy_array(warp: Any) -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    every_second = bridge.as_warp(array[::2, 1:])
    assert every_second.shape == (5, 99)
    every_second.fill_(-1.0)
    assert (array[::2, 1:] == -1).all()
    assert (array[1::2].ravel() >= 0).all()
    assert (array[:, 0] >= 0).all()


def _layouts() -> dict[str, Callable[[], Any]]:
    def grid() -> Any:
        return np.arange(6 * 7, dtype=np.float64).reshape(6, 7)

    def read_only() -> Any:
        array = grid()
        array.flags.writeable = False
        return array

    return {
        "c": grid,
        "fortran": lambda: np.asfortranarray(grid()),
        "transposed": lambda: grid().T,
        "reversed": lambda: grid()[::-1],
        "reversed both": lambda: grid()[::-1, ::-2],
        "sliced": lambda: grid()[1:5:2, 2:],
        "x[1:]": lambda: np.arange(100.0)[1:],
        "read-only": read_only,
        "0-d": lambda: np.array(5.0),
        "structured": lambda: np.ones(9, [("a", "f4"), ("b", "i8", (2,)), ("c", [("d", "u1")])]),
        "swapped": lambda: np.arange(9, dtype=">i4"),
        "complex": lambda: np.arange(9, dtype=np.complex64),
        "bool": lambda: np.ones((3, 3), bool),
        "text": lambda: np.array(["one", "three"]),
        "times": lambda: np.arange(9).astype("M8[s]"),
        "bytes": lambda: np.zeros(5, "V16"),
        "broadcast": lambda: np.broadcast_to(np.arange(5.0), (4, 5)),
        "one field": lambda: np.ones(9, [("a", "f4"), ("b", "i8")])["b"],
    }


LAYOUTS = _layouts()


@pytest.mark.behaviour("I2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_numpy_keeps_layout_values_and_flags(layout: str) -> None:
    array = LAYOUTS[layout]()
    view = bridge.as_numpy(Interface(array))
    assert view.ctypes.data == array.ctypes.data
    assert (view.shape, view.strides, view.dtype) == (array.shape, array.strides, array.dtype)
    assert view.flags.writeable == array.flags.writeable
    assert not view.flags.owndata
    assert (view == array).all()
    assert bridge.as_numpy(array) is array


@pytest.mark.behaviour("I2")
@pytest.mark.requires("warp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_warp_shares_or_says_why_not(warp: Any, layout: str) -> None:
    array = LAYOUTS[layout]()
    shareable = {"c", "fortran", "transposed", "sliced", "x[1:]", "bool", "reversed", "reversed both", "one field"}
    try:
        view = bridge.as_warp(array)
    except bridge.ViewError as error:
        assert isinstance(error, TypeError)
        assert layout not in shareable, error
        return
    assert layout in shareable
    assert view.ptr == array.ctypes.data
    assert (view.shape, view.strides) == (array.shape, array.strides)
    assert (view.numpy() == array).all()
    back = bridge.as_numpy(view)
    assert (back.ctypes.data, back.strides, back.dtype) == (array.ctypes.data, array.strides, array.dtype)


@pytest.mark.behaviour("I2")
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
def test_arrays_without_elements_convert(shape: tuple[int, ...]) -> None:
    array = np.empty(shape, np.float32)
    view = bridge.as_numpy(Interface(array))
    assert (view.shape, view.dtype) == (shape, np.float32)


@pytest.mark.behaviour("I3")
def test_memory_that_is_not_the_bridges_is_a_type_error_that_names_the_fix() -> None:
    with CHeapBlock(4096) as ptr:
        foreign = Interface(np.empty(4096, "u1"), data=(ptr, False))
        with pytest.raises(TypeError, match="does not lie in a live block of the bridge") as caught:
            bridge.as_numpy(foreign)
    assert isinstance(caught.value, bridge.ViewError)
    assert "copy it" in str(caught.value)


@pytest.mark.behaviour("I3")
@pytest.mark.parametrize("shape", [(4097,), (1, 8192)])
def test_an_array_that_reaches_beyond_its_block_is_refused(shape: tuple[int, ...]) -> None:
    block = np.empty(4096, "u1")
    with pytest.raises(bridge.ViewError):
        bridge.as_numpy(Interface(block, shape=shape))


@pytest.mark.behaviour("I3")
def test_a_block_that_was_freed_is_refused() -> None:
    block = np.empty(4096, "u1")
    stale = Interface(np.empty(1), data=(block.ctypes.data, False), shape=(4096,), typestr="|u1")
    del block
    with pytest.raises(bridge.ViewError, match="live block"):
        bridge.as_numpy(stale)


@pytest.mark.behaviour("I3")
@pytest.mark.parametrize("thing", [None, "text", 7, [1, 2], object()])
@pytest.mark.parametrize("convert", [bridge.as_numpy, pytest.param(bridge.as_warp, marks=pytest.mark.requires("warp"))])
def test_a_thing_that_is_no_array_is_refused(convert: Callable[[Any], Any], thing: Any) -> None:
    with pytest.raises(bridge.ViewError):
        convert(thing)


@pytest.mark.behaviour("I3")
@pytest.mark.behaviour("U2")
@pytest.mark.requires("warp")
def test_arrays_that_warp_made_on_the_cpu_are_refused_with_what_can_be_done(warp: Any) -> None:
    made_by_warp = warp.zeros(10, device="cpu")
    for share in (bridge.as_numpy, bridge.as_dlpack):
        with pytest.raises(bridge.ViewError, match=r"Warp's own memory of the CPU.* take as_warp\(\) of it"):
            share(made_by_warp)


@pytest.mark.requires("warp")
def test_as_warp_takes_rows_as_vectors(warp: Any) -> None:
    points = np.zeros((10, 3), np.float32)
    for rows in (points, points[::2], np.zeros((10, 5), np.float32)[:, :3]):
        for vectors in (bridge.as_warp(rows, dtype=warp.vec3), bridge.as_warp(rows).view(warp.vec3)):
            assert (vectors.shape, vectors.dtype, vectors.ptr) == ((len(rows),), warp.vec3, rows.ctypes.data)
            vectors.fill_(warp.vec3(1.0, 2.0, 3.0))
            assert (rows == [1, 2, 3]).all()
    vectors, address = bridge.as_warp(points, dtype=warp.vec3), points.ctypes.data
    del points, rows
    gc.collect()
    assert bridge.owns(address)
    assert bridge.owns(vectors)
    assert bridge.as_warp(vectors, dtype=warp.float32).shape == bridge.as_numpy(vectors).shape == (10, 3)
    assert bridge.as_warp(np.zeros((0, 3), np.float32), dtype=warp.vec3).shape == (0,)


@pytest.mark.requires("warp")
def test_as_warp_refuses_types_that_the_bytes_are_none_of(warp: Any) -> None:
    points = np.zeros((10, 3), np.float32)
    for wrong in (warp.vec4, warp.float64, np.float32, "vec3", 3):
        with pytest.raises(bridge.ViewError, match=r"an array of shape \(10, 3\), float32, is none of"):
            bridge.as_warp(points, dtype=wrong)


@pytest.mark.requires("warp")
def test_as_warp_refuses_numpys_own_memory(warp: Any) -> None:
    array = np.frombuffer(bytearray(400), np.float32)
    with pytest.raises(bridge.ViewError, match="does not lie"):
        bridge.as_warp(array)


@pytest.mark.behaviour("I4")
def test_the_last_view_of_a_chain_keeps_the_block_alive() -> None:
    source = np.full(MIB, 7, "u1")
    views = [bridge.as_numpy(Interface(source))]
    for _ in range(2):
        views.append(bridge.as_numpy(Interface(views[-1])))
    del source
    last = views.pop()
    views.clear()
    gc.collect()
    assert bridge.stats().current_count == 1
    assert last.sum(dtype=int) == 7 * MIB
    assert not last.flags.owndata
    with pytest.raises(ValueError, match="own"):
        last.resize(2 * MIB, refcheck=False)
    del last
    assert bridge.stats().current_count == 0


@pytest.mark.behaviour("I4")
@pytest.mark.requires("warp")
def test_a_chain_through_warp_keeps_the_block_alive(warp: Any) -> None:
    last = bridge.as_numpy(bridge.as_warp(bridge.as_numpy(bridge.as_warp(np.full(MIB, 7, "u1")))))
    gc.collect()
    assert [each.requested_bytes for each in bridge.snapshot()] == [MIB]
    assert last.sum(dtype=int) == 7 * MIB
    del last
    gc.collect()
    assert bridge.stats().current_count == 0


@pytest.mark.behaviour("I4")
def test_a_view_in_a_cycle_is_collected_with_its_block() -> None:
    class Node:
        pass

    node = Node()
    node.view = bridge.as_numpy(Interface(np.full(MIB, 7, "u1")))  # type: ignore[attr-defined]
    node.itself = node  # type: ignore[attr-defined]
    del node
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()
    assert bridge.stats().current_count == 0


@pytest.mark.behaviour("I4")
def test_views_that_outlive_everything_give_no_warning_of_numpys() -> None:
    must_succeed(
        run_python(
            """
            import gc
            import numpy as np
            import rmm_managed_bridge as bridge


            class Interface:
                def __init__(self, array):
                    self.array = array
                    self.__array_interface__ = array.__array_interface__


            with bridge.installed("host", frameworks=["numpy"]):
                view = bridge.as_numpy(Interface(np.ones(1 << 20, "u1")))
            gc.collect()
            assert view.all() and bridge.owns(view)
            cycle = [view]
            cycle.append(cycle)
            del view, cycle
            gc.collect()
            assert bridge.stats().current_count == 0
            at_exit = np.ones(10)
            """,
            environment={"NUMPY_WARN_IF_NO_MEM_POLICY": "1"},
        )
    )


@pytest.mark.behaviour("I2")
@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", "u1"), ("b", "f8")], align=True),
        np.dtype([("only", "i4")]),
        np.dtype([("outer", [("inner", "f4")]), ("rest", "i2")]),
    ],
    ids=["padded", "one field", "nested"],
)
def test_fields_are_kept_through_the_array_interface(dtype: "np.dtype[Any]") -> None:
    class Interface:
        def __init__(self, array: "np.ndarray[Any, Any]") -> None:
            self.kept = array
            self.__array_interface__ = array.__array_interface__

    with bridge.installed("host", frameworks=["numpy"]):
        array = np.zeros(5, dtype)
        view = bridge.as_numpy(Interface(array))
        assert view.dtype.fields is not None and dtype.fields is not None
        for name, (kind, offset, *_) in dtype.fields.items():
            assert view.dtype.fields[name][:2] == (kind, offset)
        assert np.shares_memory(view, array)
        del view, array
        gc.collect()
