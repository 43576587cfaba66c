"""What an error says of a value: a line of it, and of an array never an element."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmm_managed_bridge.errors import is_array, shown

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300)
values = st.recursive(plain, lambda inside: st.lists(inside, max_size=20) | st.tuples(inside, inside), max_leaves=30)


@given(values)
def test_it_is_never_long(value: Any) -> None:
    assert len(shown(value)) < 4000


@given(st.text(max_size=60) | st.integers(-(1 << 200), 1 << 200))
def test_what_is_short_is_as_it_was_typed(value: Any) -> None:
    assert shown(value) == repr(value) or len(repr(value)) > 100


class Untouchable:
    """An array whose elements would have to come from a device."""

    shape, dtype = (1000, 3), np.dtype("f4")

    def __repr__(self) -> str:
        raise AssertionError("its elements were asked for")


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: (x, 1), lambda x: {"a": x}], ids=str)
def test_arrays_are_type_shape_and_dtype(wrap: Any) -> None:
    assert "Untouchable of shape (1000, 3), float32" in shown(wrap(Untouchable()))
    assert "ndarray of shape (1000,), float64" in shown(wrap(np.ones(1000)))


def test_types_are_no_arrays() -> None:
    assert is_array(np.float64(1))
    assert not is_array(np.ndarray)
    assert not is_array(SimpleNamespace(shape=()))
