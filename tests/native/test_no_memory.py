"""The core where its own memory runs out: every operator new fails in turn, in a program without Python."""

from pathlib import Path

import pytest
from fake_cuda import cuda_include
from helpers.native_sources import compile_program, fake_driver_alone, one_unit, run_program

pytestmark = pytest.mark.skipif(cuda_include() is None, reason="no cuda.h; pip install nvidia-cuda-runtime")


@pytest.mark.behaviour("M1")
def test_no_failure_ends_the_process_or_spoils_a_block(tmp_path: Path) -> None:
    library = fake_driver_alone(tmp_path / "libfake.so")
    sources = [Path(__file__).with_name("no_memory.cpp"), one_unit(tmp_path)]
    told = run_program(compile_program(tmp_path / "no_memory", sources), str(library))
    rounds = int(told.split()[-2])
    assert rounds > 100, "places where the core asks for memory"
