"""NumPy's own tests give the same outcomes with the bridge as without it: a selection; see compare.py for more."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"peers_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


compare = _load("compare")


def test_a_selection_of_numpys_gives_the_same_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    code = compare.main(["numpy", "--timeout", "240"])
    assert code == 0, capsys.readouterr().out


def test_a_difference_is_found_and_a_run_that_broke_off_is_no_success(tmp_path: Path) -> None:
    def run(folder: str, lines: list[dict[str, object]]) -> Any:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "output.txt").write_text("Segmentation fault")
        (tmp_path / folder / "outcomes.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return compare.read(tmp_path / folder / "outcomes.jsonl")

    plain = run("plain", [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "passed"}, {"end": True}])
    bridged = run("bridged", [{"test": "a", "outcome": "failed"}])
    found = [str(each) for each in compare.differences(plain, bridged)]
    assert found == ["a: passed -> failed", "b: passed -> not run"]
    assert plain.end
    assert not bridged.end
    assert "did not end: Segmentation fault" in str(bridged)


@pytest.mark.parametrize(
    ("outcomes", "end", "well"),
    [
        ({"a": ["passed"]}, {"end": True, "blocks": 1, "wrong_frees": 0}, True),
        ({"a": ["failed in collection"]}, {"end": True, "blocks": 1, "wrong_frees": 0}, False),
        ({"a": ["passed"]}, {"end": True, "blocks": 0, "wrong_frees": 0}, False),
        ({"a": ["passed"]}, {"end": True, "blocks": 1, "wrong_frees": 1}, False),
        ({"a": ["passed"]}, {}, False),
    ],
)
def test_runs_that_say_nothing_are_no_success(
    outcomes: dict[str, list[str]], end: dict[str, object], well: bool
) -> None:
    plain = compare.Run({"a": ["passed"]}, {"end": True, "blocks": 0, "wrong_frees": 0})
    assert compare.both_ran(plain, compare.Run(outcomes, end)) == well


def test_files_are_dealt_out_whole_and_runs_are_put_together() -> None:
    hands = compare.deal(compare.SUITES["numpy"].root(None), [""], 4)
    files = [file for hand in hands for file in hand]
    assert len(hands) == 4
    assert len(files) == len(set(files)) > 100
    assert "_core/tests/test_multiarray.py" in files
    assert compare.deal(Path(), ["a", "b::c"], 1) == [["a", "b::c"]]
    ended = {"end": True, "blocks": 3, "wrong_frees": 1}
    runs = [compare.Run({"a": ["passed"]}, ended), compare.Run({"b": ["failed"]}, ended)]
    assert compare.together(runs).end == {"end": True, "blocks": 6, "wrong_frees": 2}
    broken = compare.together([*runs, compare.Run(output="Segmentation fault")])
    assert not broken.end
    assert broken.output == "Segmentation fault"


def test_tests_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    for name in ("cupy", "warp", "rmm"):
        for sources in ([], ["--sources", str(tmp_path)]):
            with pytest.raises(SystemExit, match="--sources"):
                compare.main([name, *sources])


@pytest.mark.parametrize("name", compare.SUITES)
def test_every_explanation_names_a_test_and_a_reason(name: str) -> None:
    assert all("::" in test and reason for test, reason in compare.explained(compare.SUITES[name]).items())


def test_warps_tests_are_found_where_its_package_has_none(tmp_path: Path) -> None:
    """The plugin adds a folder to the package; a test of it runs, and its outcome is written."""
    pytest.importorskip("warp")
    folder = tmp_path / "warp" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_added.py").write_text(
        "import unittest, warp\n"
        "class TestAdded(unittest.TestCase):\n"
        "    def test_path(self):\n"
        "        self.assertEqual(len(warp.__path__), 2)\n"
    )
    suite = compare.SUITES["warp"]
    process, path = compare.start(suite, ["test_added.py"], "", tmp_path, tmp_path / "run")
    assert process.wait(120) == 0, (tmp_path / "run" / "output.txt").read_text()
    assert list(compare.read(path).outcomes.values()) == [["passed"]]
