"""What the README and the guide show runs as it is written, where it can run."""

import ast

import pytest
from helpers.documents import BLOCKS, PAGES, SETUP, Block, blocks_of
from helpers.programs import run_python, silent_stderr

HERE = [block for block in BLOCKS if not block.needs]
PROGRAM = blocks_of("README.md")[0]

pytestmark = pytest.mark.behaviour("U4")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_block_is_python(block: Block) -> None:
    ast.parse(block.program)


def test_no_block_is_overlooked_and_no_set_up_is_left_over() -> None:
    from helpers.documents import ROOT

    fences = sum((ROOT / page).read_text(encoding="utf-8").count("```python") for page in PAGES)
    assert len(BLOCKS) == fences
    assert sorted(key for block in BLOCKS for key in block.set_up) == sorted(SETUP)


@pytest.mark.parametrize("block", HERE, ids=lambda block: block.name)
def test_blocks_run_without_a_gpu(block: Block) -> None:
    if "warp" in block.code:
        pytest.importorskip("warp")
    done = run_python(block.program, options=("-W", "error"), timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert silent_stderr(done) == "", done.stderr


def test_the_readmes_program_prints_what_it_says() -> None:
    pytest.importorskip("warp")
    done = run_python(PROGRAM.program, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    mean = lines.index("2.0")
    assert lines[mean + 1].startswith('16.0 MiB, numpy, tag "load", ')
    assert lines[mean + 1].endswith("program.py:9, host, host")
    assert lines[mean + 2].split() == ["size", "count", "framework", "tag", "site", "device", "kind"]
    assert lines[mean + 3].split()[:5] == ["16.0", "MiB", "1", "numpy", "load"]
