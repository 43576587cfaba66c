"""How much a pool keeps, on a kernel that the test makes up; in a program without Python."""

from pathlib import Path

import pytest
from fake_cuda import cuda_include
from helpers.native_sources import compile_program, one_unit, run_program

pytestmark = pytest.mark.skipif(cuda_include() is None, reason="no cuda.h; pip install nvidia-cuda-runtime")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program."""
    folder = tmp_path_factory.mktemp("room")
    return compile_program(folder / "room", [Path(__file__).with_name("room.cpp"), one_unit(folder)])


@pytest.mark.parametrize(
    "mode",
    [
        "budget",  # what counts as recent
        "places",  # pieces side by side, and where that cannot be
        "refusals",  # no munmap, no MADV_DONTNEED, no mmap
        "moves",  # blocks that change their size where they are or with their pages; no mremap
    ],
)
def test_what_the_kernel_does_and_refuses(room: Path, mode: str) -> None:
    run_program(room, mode)


@pytest.mark.parametrize("seed", range(40))
def test_no_program_reserves_more_than_twice_its_peak_and_128_mib(room: Path, seed: int) -> None:
    run_program(room, "random", str(seed))
