"""The acceptance list and the marks of the tests name the same ids, and the invariants name tests that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "acceptance.md"
INVARIANTS = ROOT / "docs" / "design" / "invariants.md"


def listed(page: str) -> list[str]:
    """Return the ids that the page has an entry for, in its order."""
    return re.findall(r"^- \*\*([A-Z]\d+)\*\*: ", page, re.MULTILINE)


def marked(source: str) -> Iterator[str]:
    """Give the ids in `behaviour` marks of a test file: of decorators, `pytestmark` and parameters alike."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "behaviour":
            for argument in node.args:
                assert isinstance(argument, ast.Constant), f"line {node.lineno}: an id must be written out"
                yield str(argument.value)


def differences(ids: list[str], used: set[str]) -> list[str]:
    """Say what is wrong between the page's ids and those that tests use."""
    wrong = [f"{each} is on the page twice" for each in sorted(set(ids)) if ids.count(each) > 1]
    wrong += [f"{each} has no test" for each in ids if each not in used]
    wrong += [f"{each} is not on the page" for each in sorted(used.difference(ids))]
    return wrong


def test_page_and_marks_agree() -> None:
    used = {each for path in (ROOT / "tests").rglob("test_*.py") for each in marked(path.read_text())}
    assert used, "no test has a mark: this looks in the wrong place"
    assert differences(listed(PAGE.read_text()), used) == []


def test_entries_and_marks_are_found() -> None:
    page = "text about **L1**\n\n- **L1**: one. (CPU)\n- **N10**: two,\n  on **S1**. (GPU)\n- **M1** no entry\n"
    assert listed(page) == ["L1", "N10"]
    source = """
pytestmark = [pytest.mark.fake_driver, pytest.mark.behaviour("M3")]

@pytest.mark.behaviour("L1", "L2")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.behaviour("S1"))])
def test_it(x): 'pytest.mark.behaviour("X1") in a text'
"""
    assert set(marked(source)) == {"M3", "L1", "L2", "S1"}


def test_each_kind_of_difference_is_told() -> None:
    assert differences(["L1", "L2"], {"L1", "L2"}) == []
    assert differences(["L1", "L2", "L2"], {"L2", "X9"}) == [
        "L2 is on the page twice",
        "L1 has no test",
        "X9 is not on the page",
    ]


def unproved(page: str) -> list[str]:
    """Say which invariants of the page, down to those to come, name no test or one that does not exist."""
    wrong = []
    for section in re.split(r"^## (?=\d)", page.partition("## To come")[0], flags=re.MULTILINE)[1:]:
        named = re.findall(r"`(tests/\S+)`", section)
        number = section.partition(".")[0]
        wrong += [] if named else [f"{number} names no test"]
        wrong += [f"{number} names {each}, which does not exist" for each in named if not (ROOT / each).exists()]
    return wrong


def test_each_invariant_names_tests_that_exist() -> None:
    page = INVARIANTS.read_text()
    assert re.findall(r"^## (\d+)\. ", page, re.MULTILINE) == [str(number) for number in range(1, 16)]
    assert unproved(page) == []
    example = "## 1. Own\n`tests/unit`\n## 2. Host\n\n## 3. Stream\n`tests/gone.py`\n## To come\n## 4. Late\n"
    assert unproved(example) == ["2 names no test", "3 names tests/gone.py, which does not exist"]
