"""Columns of data frames that lie in one array: of pandas, polars and Arrow, by what each says itself."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rmm_managed_bridge.errors import ViewError


def values_of(x: Any) -> "np.ndarray[Any, Any] | None":
    """Return the NumPy array over the bytes of a column; None if `x` is no column that is one array.

    Raises
    ------
    ViewError
        If the column has nulls, or more than one piece, so that only a copy would be an array.
    """
    library = type(x).__module__.partition(".")[0]
    find = _LIBRARIES.get(library)
    return None if find is None else find(x)


def _of_pandas(x: Any) -> "np.ndarray[Any, Any] | None":
    # Other dtypes are pandas' own, and their arrays are made when they are asked for.
    return x.to_numpy() if isinstance(getattr(x, "dtype", None), np.dtype) and hasattr(x, "array") else None


def _of_polars(x: Any) -> "np.ndarray[Any, Any] | None":
    return _without_a_copy(x, allow_copy=False) if type(x).__name__ == "Series" else None


def _of_arrow(x: Any) -> "np.ndarray[Any, Any] | None":
    if type(x).__name__ == "ChunkedArray" and x.num_chunks == 1:
        x = x.chunk(0)
    return _without_a_copy(x, zero_copy_only=True) if hasattr(x, "buffers") else None


def _without_a_copy(x: Any, **how: bool) -> "np.ndarray[Any, Any]":
    try:
        values: np.ndarray[Any, Any] = x.to_numpy(**how)
    except (RuntimeError, ValueError) as error:  # polars; Arrow's ArrowInvalid is a ValueError
        raise ViewError(
            f"this {type(x).__name__} is not one plain array ({error}); copy it: numpy.array(x), after fill_null() "
            "where it has nulls"
        ) from None
    return values


_LIBRARIES: dict[str, Callable[[Any], "np.ndarray[Any, Any] | None"]] = {
    "pandas": _of_pandas,
    "polars": _of_polars,
    "pyarrow": _of_arrow,
}
