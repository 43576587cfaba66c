"""One meaning of each word for a place, whatever the call."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmm_managed_bridge.errors import ConfigError
from rmm_managed_bridge.frameworks.places import CPU, MOST_DEVICES, device_number

ORDER = "the array comes first, f(x, to)"


class Stream:
    device_id = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 7


def cased(words: list[str]) -> st.SearchStrategy[str]:
    return st.sampled_from(words).flatmap(lambda word: st.sampled_from([word, word.upper(), word.title(), f" {word} "]))


@given(cased(["cpu", "host"]))
def test_the_cpu(text: str) -> None:
    assert device_number(text, "to", ORDER) == CPU


@given(st.integers(0, MOST_DEVICES - 1), st.data())
def test_a_device_by_number_and_text(number: int, data: st.DataObject) -> None:
    for value in (number, np.int64(number), SimpleNamespace(id=number), data.draw(cased([f"cuda:{number}"]))):
        assert device_number(value, "to", ORDER) == number
    assert device_number(data.draw(cased(["cuda"])), "to", ORDER) == 0


@given(st.text(max_size=12) | st.integers() | st.floats() | st.none() | st.booleans())
def test_all_else_is_refused(value: Any) -> None:
    try:
        assert CPU <= device_number(value, "to", ORDER) < MOST_DEVICES
    except ConfigError as error:
        assert str(error).startswith("to=")


@pytest.mark.parametrize("wrong", [np.ones(1000), Stream()], ids=["array", "stream"])
def test_the_wrong_order_is_told(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"the array comes first, f\(x, to\)") as caught:
        device_number(wrong, "to", ORDER)
    assert len(str(caught.value)) < 200
