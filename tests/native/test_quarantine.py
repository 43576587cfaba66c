"""The quarantine and the table of lanes alone, fed with invented events: no driver, real or fake, is there."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cuda import cuda_include
from helpers.native_sources import ADDRESSES, CPP, compile_program, run_program

HERE = Path(__file__).parent
SOURCES = [HERE / "quarantine.cpp", *sorted((CPP / "streams").glob("*.cpp")), CPP / "driver" / "events.cpp"]

pytestmark = pytest.mark.skipif(cuda_include() is None, reason="no cuda.h; pip install nvidia-cuda-runtime")


@pytest.fixture(scope="module")
def quarantine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the program, compiled once for each set of flags."""

    @functools.cache
    def compiled(*flags: str) -> Path:
        return compile_program(tmp_path_factory.mktemp("quarantine") / "quarantine", SOURCES, *flags)

    return compiled


@pytest.mark.parametrize("seed", range(8))
def test_blocks_come_out_once_and_exactly_when_the_work_before_has_ended(
    seed: int, quarantine: Callable[..., Path]
) -> None:
    run_program(quarantine(), "model", str(seed), "6000")


@pytest.mark.parametrize("seed", range(100, 104))
def test_nothing_is_touched_that_is_gone(seed: int, quarantine: Callable[..., Path]) -> None:
    run_program(quarantine(*ADDRESSES), "model", str(seed), "3000")


@pytest.mark.parametrize("lanes", ["new", "again"])
def test_a_stream_that_there_was_no_memory_for_takes_no_number(lanes: str, quarantine: Callable[..., Path]) -> None:
    run_program(quarantine(), "numbers", lanes)
