"""What the README and the guide show runs as it is written on a GPU, each block in a program of its own."""

import os
from pathlib import Path

import pytest
from helpers.documents import BLOCKS, Block, blocks_of
from helpers.programs import run_on_gpu

README = blocks_of("README.md")[0]

pytestmark = pytest.mark.behaviour("U4")


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.name, marks=pytest.mark.requires(*block.needs))
        for block in [*BLOCKS, README._replace(needs=("gpu", "cupy")), README._replace(needs=("gpu", "warp"))]
        if block.needs
    ],
)
def test_blocks_run_on_a_gpu(block: Block, tmp_path: Path) -> None:
    # In a file, where Warp looks for the source of a kernel.
    program = tmp_path / "block.py"
    program.write_text(block.program, encoding="utf-8")
    run_on_gpu(f"import os, runpy\nos.chdir({os.fspath(tmp_path)!r})\nrunpy.run_path({os.fspath(program)!r})")
