"""The fixture of docs/guide/testing.md, in a test run of its own: it passes what is clean and fails what leaks."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.documents import blocks_of
from helpers.programs import program_environment

PAGE = "docs/guide/testing.md"
SMOOTH = """
import numpy as np

def smooth(x):
    return np.convolve(x, np.ones(5) / 5, mode="same")

"""
LEAK = """
kept = []

def test_leak(memory):
    kept.append(np.ones(1000))
"""

pytestmark = pytest.mark.behaviour("U4")


def test_the_fixture_passes_what_is_clean_and_fails_what_leaks(tmp_path: Path) -> None:
    fixture, test = (block.code for block in blocks_of(PAGE))
    (tmp_path / "conftest.py").write_text(fixture)
    (tmp_path / "test_smooth.py").write_text(SMOOTH + test + LEAK)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env=program_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ERROR test_smooth.py::test_leak - AssertionError" in done.stdout, done.stdout
    assert "2 passed, 1 error" in done.stdout
