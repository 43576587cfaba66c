"""The programs of docs/gallery run on a GPU as they are written."""

from pathlib import Path

import pytest
from helpers.documents import ROOT
from helpers.programs import run_on_gpu

PROGRAMS = sorted((ROOT / "docs/gallery").glob("*.py"))


@pytest.mark.requires("gpu", "cupy", "warp")
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_each_runs(path: Path, tmp_path: Path) -> None:
    # From a file: Warp reads the source of kernels.
    program = tmp_path / path.name
    program.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    run_on_gpu(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')")
