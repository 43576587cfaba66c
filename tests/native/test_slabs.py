"""The slab store alone, on pieces from the kernel; each place at which it needs memory of its own fails in turn."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cuda import cuda_include
from helpers.native_sources import ADDRESSES, CPP, compile_program, run_program

SOURCES = [Path(__file__).with_name("slabs.cpp"), *sorted((CPP / "pages").glob("*.cpp"))]

pytestmark = pytest.mark.skipif(cuda_include() is None, reason="no cuda.h; pip install nvidia-cuda-runtime")


@pytest.fixture(scope="module")
def slabs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the program, compiled once for each set of flags."""

    @functools.cache
    def compiled(*flags: str) -> Path:
        return compile_program(tmp_path_factory.mktemp("slabs") / "slabs", SOURCES, *flags)

    return compiled


@pytest.mark.parametrize("seed", range(8))
def test_no_two_blocks_share_a_byte_and_all_memory_comes_back(seed: int, slabs: Callable[..., Path]) -> None:
    run_program(slabs(), str(seed), "6000")


@pytest.mark.parametrize("seed", range(100, 104))
def test_the_store_touches_nothing_that_is_gone(seed: int, slabs: Callable[..., Path]) -> None:
    run_program(slabs(*ADDRESSES), str(seed), "3000")
