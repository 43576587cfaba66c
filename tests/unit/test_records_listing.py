"""Several records as a table: every record has a row, none breaks it, and the types stay what they were."""

import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmm_managed_bridge.records import CallSite, Groups, Holder, Records, Usage
from rmm_managed_bridge.records.listing import html_table, text_table
from rmm_managed_bridge.records.together import ByteSums

words = st.text(max_size=20)
tables = st.lists(st.fixed_dictionaries({"size": words, "tag": words, "site": words}), min_size=1, max_size=6)


def holder(number: int, tag: str = "") -> Holder:
    return Holder("numpy", tag, CallSite("sim.py", number, "main"), 0, "managed", number << 20, number)


held = st.lists(st.builds(holder, st.integers(1, 99), words), max_size=30).map(Records)


@given(tables)
def test_a_table_has_a_line_for_each_row_and_one_of_heads(rows: list[dict[str, str]]) -> None:
    lines = text_table(rows).split("\n")
    assert len(lines) == len(rows) + 1
    assert all(line == line.rstrip() for line in lines)


@given(tables)
def test_html_shows_text_as_text(rows: list[dict[str, str]]) -> None:
    found = html_table(rows)
    assert found.count("<tr>") == len(rows) + 1
    assert set(re.findall(r"</?(\w+)>", found)) <= {"table", "thead", "tbody", "tr", "th", "td"}


@given(held, st.slices(30))
def test_records_are_a_tuple_and_so_are_their_slices(records: Records[Holder], part: slice) -> None:
    plain = tuple(records)
    assert records == plain and hash(records) == hash(plain)
    assert records[part] == plain[part]
    assert isinstance(records[part], Records)
    assert pickle.loads(pickle.dumps(records)) == records
    assert isinstance(copy.deepcopy(records), Records)


@pytest.mark.behaviour("U3")
@given(held)
def test_print_shows_all_and_an_echo_says_what_it_leaves_out(records: Records[Holder]) -> None:
    heads = 1 if records else 0
    assert len(str(records).splitlines()) == (len(records) + heads or 1)
    left = len(records) - 20
    assert (f"... and {left} more" in repr(records)) == (left > 0)
    assert (f"... and {left} more" in records._repr_html_()) == (left > 0)


def test_numbers_are_at_the_right_and_words_at_the_left() -> None:
    assert str(Records([holder(1, "load"), holder(12)])).splitlines() == [
        "    size  count  framework  tag   site       device  kind",
        "1.00 MiB      1  numpy      load  sim.py:1   cuda:0  managed",
        "12.0 MiB     12  numpy            sim.py:12  cuda:0  managed",
    ]


@pytest.mark.parametrize("groups", [ByteSums("tag", {"a": 3 << 20, "": 5}), Groups("tag", {"a": Usage(1, 2, 3, 4, 5)})])
def test_sums_are_a_dictionary_with_a_table(groups: Groups[object]) -> None:
    assert groups == dict(groups)
    again = pickle.loads(pickle.dumps(groups))
    assert (type(again), again, again.key) == (type(groups), groups, "tag")
    assert str(groups).splitlines()[0].startswith("tag")
    assert len(str(groups).splitlines()) == len(groups) + 1
    assert groups._repr_html_().count("<tr>") == len(groups) + 1
    assert repr(groups) == str(groups)


def test_what_has_no_name_is_said_to_have_none() -> None:
    assert str(ByteSums("tag", {"load": 2048, "": 5})).splitlines() == [
        "tag         size",
        "load    2.00 KiB",
        "(none)       5 B",
    ]
