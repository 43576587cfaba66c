"""The check of the documents lets good pages and docstrings through, and rejects what is made here."""

from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers.ci_tools import ROOT, load, run, write

check = load("check_documents")
WORDS = " ".join(["word"] * 30)


def test_this_repository_passes() -> None:
    """And the figures are told."""
    passed = run("check_documents")
    assert passed.returncode == 0, passed.stdout
    assert " names" in passed.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "text",
    [
        f"{WORDS} more.",
        f"First. {WORDS}\nmore. Last.",
        f"- {WORDS}\n  more",
        f"| a | {WORDS} more |",
        f"# {WORDS} more",
        f"[{WORDS} more](page.md)",
        f"{WORDS} `code of several words`.",
        f"{WORDS}; more: more",
    ],
)
def test_sentences_above_thirty_words_are_rejected(text: str) -> None:
    """In paragraphs, items, cells, headings and links; a pair of backquotes is one word."""
    (finding,) = check.check_page("page.md", text)
    assert finding.startswith("page.md:")
    assert "above 30" in finding


@pytest.mark.parametrize(
    "text",
    [
        f"{WORDS}.",
        f"{WORDS}. {WORDS}! {WORDS}? More.",
        f"({WORDS}.) More.",
        f"- {WORDS}\n- {WORDS}",
        f"{WORDS}\n\n{WORDS}",
        f"{WORDS}\n```text\n{WORDS}\n```\n",
        f"<!-- {WORDS} {WORDS} -->",
        f"| {WORDS} | {WORDS} |\n| --- | --- |",
        "- a\n  b\n  c\n  d\n\ntext\n",
    ],
)
def test_what_is_short_enough_passes(text: str) -> None:
    """Up to thirty words, and four lines."""
    assert check.check_page("page.md", text) == []


def test_items_above_four_lines_are_rejected_with_their_line() -> None:
    """Of numbered lists too, and at the end of a page."""
    text = "text\n\n- short\n- a\n  b\n  c\n  d\n  e\n\n1. a\n   b\n   c\n   d\n   e"
    assert [finding.split(",")[0] for finding in check.check_page("page.md", text)] == [
        "page.md:4: an item of 5 lines",
        "page.md:10: an item of 5 lines",
    ]


def good(x: int) -> int:
    """Return it.

    Parameters
    ----------
    x : int

    Returns
    -------
    int

    Raises
    ------
    TypeError

    Examples
    --------
    >>> good(1)
    1
    """
    return x


def bare(x: int) -> int:
    """Return it."""
    return x


def nothing() -> None:
    """Do it.

    >>> nothing()
    """


def never(x: int) -> NoReturn:
    """Raise. Never an error, they say.

    Parameters
    ----------
    x : int

    >>> never
    """
    raise ValueError


REFERENCE = "".join(f".. autofunction:: {name}\n" for name in ("good", "bare", "nothing", "never"))


@pytest.mark.parametrize("thing", [good, nothing, never])
def test_names_with_all_that_is_asked_pass(thing: Any) -> None:
    """What takes nothing needs no parameters, and what returns nothing no returns."""
    assert check.check_names({thing.__name__: thing}, f"bridge.{thing.__name__}()", REFERENCE) == []


def test_names_without_are_rejected() -> None:
    """Each thing that is missing is a line; a name within another is not that name."""
    assert check.check_names({"bare": bare}, "bare_metal()", ".. autofunction:: bare_metal") == [
        "bare: in no block of code of the pages",
        "bare: not in docs/api/reference.md",
        "bare: its docstring has no section Parameters",
        "bare: its docstring has no section Raises",
        "bare: its docstring has no section Returns",
        "bare: its docstring has no example",
    ]


def test_the_script_fails_on_pages_that_are_hard_to_read(tmp_path: Path) -> None:
    """As CI runs it."""
    pages = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    write(tmp_path, pages | {"README.md": f"{WORDS} more."})
    rejected = run("check_documents", tmp_path)
    assert rejected.returncode == 1
    assert "README.md:1: a sentence of 31 words" in rejected.stdout
