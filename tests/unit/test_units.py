"""Bytes as text and back."""

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmm_managed_bridge.errors import BridgeError, ConfigError, shown
from rmm_managed_bridge.units import format_bytes, parse_bytes, parse_bytes_or_fraction

FACTORS = {
    "": 1, "B": 1,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
    "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
}  # fmt: skip
LARGEST = 2**63 - 1
sizes = st.integers(0, LARGEST) | st.builds(lambda power, off: 2**power + off, st.integers(1, 62), st.integers(-1, 1))


@given(sizes)
def test_an_integer_is_itself(size_bytes: int) -> None:
    """As an integer, as digits, and as NumPy's integer."""
    assert parse_bytes(size_bytes) == parse_bytes(str(size_bytes)) == parse_bytes(f"{size_bytes} B") == size_bytes
    assert parse_bytes(np.int64(size_bytes)) == size_bytes  # type: ignore[arg-type]


@given(sizes.filter(lambda size_bytes: size_bytes <= 8191 * 2**50))
def test_text_and_back_is_within_rounding(size_bytes: int) -> None:
    """Good to half a unit in the last figure; exact below 1 KiB. The largest sizes round up to one that is refused."""
    back = parse_bytes(format_bytes(size_bytes))
    assert abs(back - size_bytes) <= size_bytes * 0.0055
    if size_bytes < 1024:
        assert back == size_bytes


@given(sizes)
def test_text_is_short_and_symmetric(size_bytes: int) -> None:
    """At most four digits, one unit, and the sign in front."""
    text = format_bytes(size_bytes)
    assert re.fullmatch(r"\d{1,4} B|(\d\.\d\d|1?\d\d\.\d|\d{3,4}|10\.00) [KMGTP]iB", text)
    assert format_bytes(-size_bytes) == (f"-{text}" if size_bytes else text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (-1536, "-1.50 KiB"),
        (16 << 20, "16.0 MiB"),
        (512 << 20, "512 MiB"),
        (2 << 30, "2.00 GiB"),
        (LARGEST, "8192 PiB"),
    ],
)
def test_format_examples(size_bytes: int, text: str) -> None:
    """What people read."""
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 9000), st.integers(0, 999), st.sampled_from(sorted(FACTORS)))
def test_decimals_are_exact(whole: int, thousandths: int, unit: str) -> None:
    """A decimal number of units is that many bytes, rounded down: "1.001KB" is 1001, not 1000."""
    expected = int((whole + Fraction(thousandths, 1000)) * FACTORS[unit])
    if expected <= LARGEST:
        assert parse_bytes(f"{whole}.{thousandths:03}{unit}") == expected


@given(st.integers(0, 8000), st.sampled_from(sorted(FACTORS)), st.text(" \t", max_size=2), st.booleans())
def test_case_and_spaces_do_not_matter(number: int, unit: str, space: str, upper: bool) -> None:
    """Case, and spaces before, between and behind, change nothing."""
    text = f"{space}{number}{space}{unit}{space}"
    assert parse_bytes(text.upper() if upper else text.lower()) == number * FACTORS[unit]


@pytest.mark.parametrize(
    "size",
    [
        *(
            "",
            " ",
            "GiB",
            "-1",
            "-1GiB",
            "1e9",
            "0x10",
            "1_000",
            "1 000",
            "1,5GiB",
            "1..5GiB",
            ".",
            "5x",
            "50%",
            "8EiB",
            "nan",
        ),
        *(-1, 2**63, "8192PiB", "9" * 400 + ".5", "9" * 5000, 1.0, 2e9, None, b"1", [1], True, False),
    ],
    ids=lambda size: repr(size)[:12],
)
def test_what_is_no_size_is_refused(size: int | str) -> None:
    """One error, which is ours and a ValueError, names the argument and repeats the value, of a long text the start."""
    with pytest.raises(ConfigError) as caught:
        parse_bytes(size, "initial_pool_size")
    assert isinstance(caught.value, BridgeError)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(f"initial_pool_size={shown(size)} is ")
    assert len(str(caught.value)) < 300


@given(st.integers(0, 10000))
def test_percent_is_a_fraction_where_fractions_are_taken(hundredths: int) -> None:
    text = f"{hundredths / 100} %"
    assert parse_bytes_or_fraction(text) == pytest.approx(hundredths / 10000)
    assert parse_bytes_or_fraction(str(hundredths / 10000)) == pytest.approx(hundredths / 10000)
    with pytest.raises(ConfigError, match="no share of the memory is taken here"):
        parse_bytes(text)


@pytest.mark.parametrize("size", ["101%", "100.5%", "-1%", "%", 1.5, -0.5, float("nan"), True, "2.x"])
def test_fractions_are_between_nothing_and_all(size: object) -> None:
    with pytest.raises(ConfigError, match="release_threshold="):
        parse_bytes_or_fraction(size, "release_threshold")


@given(st.text(max_size=12) | st.from_regex(r"\A[\d.]{1,8} ?[A-Za-z]{0,3}\Z"))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    """No other exception, and no result out of range."""
    try:
        size_bytes = parse_bytes(text)
    except ConfigError:
        return
    assert isinstance(size_bytes, int)
    assert 0 <= size_bytes <= LARGEST
