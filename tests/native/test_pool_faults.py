"""Faults of a kind that pools have had, each made to happen without luck, in a program without Python."""

from pathlib import Path

import pytest
from fake_cuda import cuda_include
from helpers.native_sources import compile_program, fake_driver_alone, one_unit, run_program

pytestmark = pytest.mark.skipif(cuda_include() is None, reason="no cuda.h; pip install nvidia-cuda-runtime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the program and the fake driver."""
    folder = tmp_path_factory.mktemp("faults")
    fake_driver_alone(folder / "libfake.so")
    compile_program(folder / "faults", [Path(__file__).with_name("pool_faults.cpp"), one_unit(folder)])
    return folder


def run(folder: Path, mode: str) -> None:
    run_program(folder / "faults", str(folder / "libfake.so"), mode)


@pytest.mark.behaviour("M1")
def test_a_trim_that_lacks_memory_hands_out_no_live_block(folder: Path) -> None:
    run(folder, "trim")


def test_a_block_that_is_shown_while_it_is_copied_waits_for_the_stream(folder: Path) -> None:
    run(folder, "copy")


@pytest.mark.behaviour("M1")
def test_a_pool_that_could_not_be_made_is_known_to_nobody(folder: Path) -> None:
    run(folder, "making")


def test_threads_that_keep_blocks_take_no_more_than_one_thread_would(folder: Path) -> None:
    run(folder, "slabs")
