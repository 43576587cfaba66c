"""NumPy's own tests give the same outcomes with the bridge as without it. Here a selection; see compare.py."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"peers_numpy_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


compare = _load("compare")


def test_a_selection_gives_the_same_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    code = compare.main(["--timeout", "240"])
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
    assert bridged.output == "Segmentation fault"


def test_files_are_dealt_out_whole_and_runs_are_put_together() -> None:
    hands = compare.deal([""], 4)
    files = [file for hand in hands for file in hand]
    assert len(hands) == 4
    assert len(files) == len(set(files)) > 100
    assert "_core/tests/test_multiarray.py" in files
    assert compare.deal(["a", "b::c"], 1) == [["a", "b::c"]]
    ended = {"end": True, "blocks": 3, "wrong_frees": 1}
    runs = [compare.Run({"a": ["passed"]}, ended), compare.Run({"b": ["failed"]}, ended)]
    assert compare.together(runs).end == {"end": True, "blocks": 6, "wrong_frees": 2}
    broken = compare.together([*runs, compare.Run(output="Segmentation fault")])
    assert not broken.end
    assert broken.output == "Segmentation fault"
    difference = compare.Difference("a", ("passed",), ("failed",))
    text = compare.table(compare.together(runs), broken, "host", [difference], {"a": "a reason"})
    assert "| without the bridge | 1 | 1 | yes |" in text
    assert "| with the bridge, host | 1 | 1 | no |" in text
    assert "- `a: passed -> failed`: a reason" in text


def test_every_explanation_names_a_test_and_a_reason() -> None:
    assert all("::" in test and reason for test, reason in compare.explained().items())
