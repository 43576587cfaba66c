"""Call sites are text: they keep nothing of the program, name the line that Python names, and have a bound."""

import gc
import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import pytest
from helpers.programs import must_succeed, run_python
from hypothesis import given, settings
from hypothesis import strategies as st

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import process as native_process

pytestmark = pytest.mark.behaviour("P6")

FILE = "/made/by/a/test.py"


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with bridge.installed("host", frameworks=["numpy"]):
        yield


class Here:
    """A size whose `line` is, after use, the line that Python says its caller was on while NumPy took it."""

    line = 0

    def __index__(self) -> int:
        self.line = sys._getframe(1).f_lineno
        return 100


def _site(array: Any) -> tuple[str, int, str]:
    record = bridge.allocation_of(array)
    assert record is not None
    return record.site[:3]


def _run(source: str, file: str = FILE) -> dict[str, Any]:
    names: dict[str, Any] = {"np": np, "Here": Here}
    exec(compile(source, file, "exec"), names)
    return names


# Each leaves the size it used in `here` and the array in `made`, and may be put anywhere.
STATEMENTS = [
    "here = Here(); made = np.empty(here)",
    "here = (\n  Here()\n)\n\nmade = (np.\n  empty(\n    here,\n  ))",
    "here = Here()\nmade = [np.empty(each)\n  for each in (here,)][0]",
    "here = Here()\nmade = (lambda each:\n  np.empty(each))(here)",
    "here = Here()\nfor each in range(3):\n  made = None\n  made = np.empty(here) if each == 2 else None",
    "here = Here()\ntry:\n  1 / 0\nexcept ZeroDivisionError:\n  made = np.empty(here)",
    "here = Here()\ndef generate():\n  yield 1\n  yield np.empty(here)\n_, made = generate()",
    "here = Here()\nclass Made:\n  array = np.empty(here)\nmade = Made.array",
    "here = Here()\nmade = eval('np.empty(here)', globals())",
]
PADDING = st.sampled_from(
    ["", "\n" * 3, "\n" * 700, "padding = [" + "1,\n" * 20 + "]", "padding = 1; " * 30, "pass\n" * 300]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PADDING, st.sampled_from(STATEMENTS)), min_size=1, max_size=4), st.booleans())
def test_the_line_is_the_one_that_python_names(parts: list[tuple[str, str]], in_a_function: bool) -> None:
    lines = []
    for padding, statement in parts:
        lines.extend([padding, statement, "checks.append((here.line, made))"])
    source = "\n".join(lines)
    if in_a_function:
        source = "def function():\n  global here\n  " + source.replace("\n", "\n  ") + "\nfunction()"
    checks: list[tuple[int, Any]] = []
    names: dict[str, Any] = {"np": np, "Here": Here, "checks": checks}
    exec(compile(source, FILE, "exec"), names)
    assert [_site(array)[1] for _, array in checks] == [line for line, _ in checks]
    assert len(checks) == len(parts)
    checks.clear()
    names.clear()


def test_code_that_allocated_dies_when_it_is_dropped() -> None:
    refs: list[weakref.ref[CodeType]] = []
    for _ in range(500):
        names = _run("def function():\n  return np.empty(3) + 1\n")
        names["function"]()
        refs.append(weakref.ref(names["function"].__code__))
    del names
    gc.collect()
    assert [ref() for ref in refs] == [None] * 500


def test_what_was_known_of_dead_code_is_not_said_of_what_comes_to_its_address() -> None:
    """As long names, tables and files as before, so that all of it comes to lie where the last one's lay."""
    addresses = set()
    for number in range(2000):
        line, name = 1 + number % 7, f"name{number % 13:02}"
        file = f"/made/file{number % 11:02}.py"
        names = _run("\n" * (line - 1) + f"def {name}(): return np.empty(9)\n" + "\n" * (7 - line), file)
        function: FunctionType = names[name]
        addresses.add(id(function.__code__))
        assert _site(function()) == (file, line, name)
        del names, function
    assert len(addresses) < 2000  # else nothing was tried


@pytest.mark.parametrize("name", ["plain.py", "na\u00efve.py", "\u03c0.py", "\U0001f40d.py", "raw\udcff.py"])
def test_names_are_as_python_has_them(name: str) -> None:
    file = f"/made/{name}"
    names = _run("def f\u00fcr_\u03c0(): return np.empty(9)\n", file)
    assert _site(names["f\u00fcr_\u03c0"]()) == (file, 1, "f\u00fcr_\u03c0")


def test_a_line_is_one_holder_however_often_it_allocates() -> None:
    line = sys._getframe().f_lineno + 1
    arrays = [np.empty(9), np.empty(9), np.empty((3, 3)), np.empty(9)]
    ours = [
        holder
        for holder, _ in bridge.stats().holders
        if holder.site[:2] == (__file__, line) and holder.current_count > 0
    ]
    assert [holder.current_count for holder in ours] == [len(arrays)]


def test_what_went_through_several_lines_of_a_library_is_summed_at_the_users() -> None:
    before = bridge.snapshot()
    line = sys._getframe().f_lineno + 1
    arrays = [np.empty(9), np.ones(9), np.full(9, 1.0), np.full(9, 2.0)]
    sites = [bridge.allocation_of(array).site for array in arrays]  # type: ignore[union-attr]
    assert [site.via and site.via.function for site in sites] == [None, "ones", "full", "full"]
    assert len({site.place for site in sites}) == 1
    (grown,) = [each for each in bridge.snapshot().compare(before).top() if each.site[:2] == (__file__, line)]
    assert (grown.current_count, grown.site.via) == (4, None)
    assert bridge.stats().by("site")[f"{__file__}:{line}"].current_count == 4
    full = bridge.allocation_of(arrays[2])
    assert full is not None
    assert str(full.site).startswith(f"{__file__}:{line} (test_what_went_through_several")
    assert "via numpy/" in str(full.site)
    assert f", {__file__}:{line}, host" in str(full)  # that NumPy's array came through NumPy is no news


@pytest.mark.parametrize("prefix", ["/library/", "/biblioth\u00e8que/", "/\u03b2\u03b9\u03b2/", "/raw\udcff/"])
def test_files_of_libraries_are_skipped_whatever_their_letters(prefix: str) -> None:
    native_process.set_file_rules(library=[prefix])
    try:
        for file in ("module.py", "\u00e9.py", "\u03c0.py", "\U0001f40d.py"):
            inner = _run("def inner(): return np.empty(9)\n", prefix + file)["inner"]
            outer = _run("def outer(inner): return inner()\n", FILE)["outer"]
            array = outer(inner)
            assert _site(array) == (FILE, 1, "outer")
            record = bridge.allocation_of(array)
            assert record is not None
            assert record.site.via == (prefix + file, 1, "inner", None, True)
            assert _site(_run("def inner(): return np.empty(9)\n", prefix[:-1] + file)["inner"]()) == (
                prefix[:-1] + file,
                1,
                "inner",
            )
    finally:
        native_process.set_file_rules()


def test_a_name_that_no_report_could_show_is_other_code() -> None:
    array = _run("array = np.empty(9)\n", "/made/" + "x" * 5000)["array"]
    assert _site(array) == ("other code", 0, "")


BOUNDED = """
    import gc
    import weakref
    import numpy as np
    import rmm_managed_bridge as bridge

    bridge.install("host", frameworks=["numpy"])
    keep = []

    def make(file, line=1, tries=1):
        names = {"np": np}
        exec(compile("\\n" * (line - 1) + "def made(): return np.empty(9)", file, "exec"), names)
        array = names["made"]()
        site = bridge.allocation_of(array).site
        keep.append((array, site))
        return site, weakref.ref(names["made"].__code__)
"""


def test_what_a_library_generated_is_at_the_line_that_called_it() -> None:
    code = (
        BOUNDED
        + """
    sites = {make(f"<lambdifygenerated-{number}>")[0] for number in range(2_000)}
    print(*sites)
    """
    )
    assert must_succeed(run_python(code)).endswith("program.py:13\n")


def test_typed_code_has_a_bound_and_leaves_room_for_files() -> None:
    code = (
        BOUNDED
        + """
    refs = [make(f"<ipython-input-{number}>") for number in range(100_000)]
    sites = [str(site) for site, _ in refs]
    first_refused = sites.index("other code")
    assert all(site == f"<ipython-input-{number}>:1" for number, site in enumerate(sites[:first_refused]))
    assert set(sites[first_refused:]) == {"other code"}
    gc.collect()
    assert sum(ref() is not None for _, ref in refs) == 0
    assert str(make("/a/users/file.py")[0]) == "/a/users/file.py:1"
    stats = bridge.stats()
    print(first_refused, len(stats.holders))
    # Nothing is lost: who has no line of his own is counted with the others.
    by = stats.by("site")
    assert by["other code"].current_count == 100_000 - first_refused
    assert sum(usage.current_count for usage in by.values()) == stats.current_count == 100_001
    assert {site for _, site in keep} == {a.site for a in bridge.snapshot()}
    """
    )
    first_refused, holders = map(int, must_succeed(run_python(code, timeout=300)).split())
    assert 900 <= first_refused <= 1024
    assert holders <= first_refused + 10


def test_files_have_a_bound() -> None:
    code = (
        BOUNDED
        + """
    sites = [str(make(f"/made/{number % 100}.py", number // 100 + 1)[0]) for number in range(10_000)]
    first_refused = sites.index("other code")
    assert sites[:first_refused] == [f"/made/{n % 100}.py:{n // 100 + 1}" for n in range(first_refused)]
    assert set(sites[first_refused:]) == {"other code"}
    before = bridge.stats().total_count
    assert sites[0] == str(make("/made/0.py", 1)[0])  # what was known before still is
    long = [str(make("/made/" + "y" * 3000 + f"{number}.py")[0]) for number in range(10)]
    assert set(long) == {"other code"}
    print(first_refused)
    """
    )
    first_refused = int(must_succeed(run_python(code, timeout=300)))
    assert 4000 <= first_refused <= 4096


def test_long_names_have_a_bound_of_bytes() -> None:
    code = (
        BOUNDED
        + """
    sites = [str(make(f"/made/{number:05}" + "y" * 4000)[0]) for number in range(3_000)]
    print(sites.index("other code"), len(set(sites)))
    """
    )
    first_refused, different = map(int, must_succeed(run_python(code, timeout=300)).split())
    assert 900 <= first_refused <= 1100
    assert different == first_refused + 1
