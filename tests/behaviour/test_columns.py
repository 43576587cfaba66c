"""Columns of data frames, read-only ones among them, as arrays of other frameworks over the same bytes."""

from typing import Any

import numpy as np
import pytest

import rmm_managed_bridge as bridge

wp = pytest.importorskip("warp")
pd = pytest.importorskip("pandas")

pytestmark = pytest.mark.behaviour("I1")


@pytest.fixture(autouse=True)
def installed() -> Any:
    with bridge.installed("host"):
        yield


def made() -> "np.ndarray[Any, Any]":
    return np.arange(1000.0)


def test_a_column_is_shown_without_a_copy_if_the_caller_allows() -> None:
    values = made()
    series = pd.DataFrame({"v": values}, copy=False)["v"]
    shared = bridge.as_warp(series, allow_readonly=True)
    assert shared.ptr == series.to_numpy().ctypes.data == values.ctypes.data
    assert shared.numpy().sum() == values.sum()


def test_a_read_only_array_is_refused_with_the_argument_that_shows_it() -> None:
    values = made()
    values.flags.writeable = False
    with pytest.raises(bridge.ViewError, match=r"read-only.*allow_readonly=True"):
        bridge.as_warp(values)
    assert bridge.as_warp(values, allow_readonly=True).ptr == values.ctypes.data


def test_questions_take_columns_too() -> None:
    values = made()
    series = pd.Series(values, copy=False)
    assert bridge.owns(series) and bridge.memory_kind(series) == "host"
    found = bridge.allocation_of(series)
    assert found is not None and found.ptr == values.ctypes.data


def test_numpy_sees_a_column_as_read_only_as_it_is() -> None:
    values = made()
    series = pd.Series(values, copy=False)
    array = bridge.as_numpy(series)
    assert array.ctypes.data == values.ctypes.data
    assert array.flags.writeable == series.to_numpy().flags.writeable


def test_a_view_keeps_the_bytes_though_the_column_goes_on_with_others() -> None:
    series = pd.Series(np.arange(1000.0), copy=False)
    shared = bridge.as_warp(series, allow_readonly=True)
    series = series.astype("f4")  # the column's array has no other name
    assert bridge.owns(shared) and shared.numpy().shape == (1000,)
    assert bridge.allocation_of(shared) is not None


@pytest.mark.parametrize(
    "column",
    [
        pd.Series(["a", None]),
        pd.Series([1, None], dtype="Int64"),
        pd.DataFrame({"a": [1.0]}),
    ],
)
def test_what_is_not_one_array_is_refused(column: Any) -> None:
    with pytest.raises(bridge.ViewError):
        bridge.as_warp(column, allow_readonly=True)


def test_polars_and_arrow_columns_lie_where_numpys_array_does() -> None:
    values = made()
    pa = pytest.importorskip("pyarrow")
    column = pa.array(values)
    assert bridge.as_numpy(column).ctypes.data == values.ctypes.data
    assert bridge.as_numpy(pa.chunked_array([column])).ctypes.data == values.ctypes.data
    with pytest.raises(bridge.ViewError, match="not one plain array"):
        bridge.as_numpy(pa.array([1.0, None]))


def test_a_polars_column_with_nulls_is_refused() -> None:
    pl = pytest.importorskip("polars")
    with pytest.raises(bridge.ViewError, match="not one plain array"):
        bridge.as_numpy(pl.Series([1.0, None]))
