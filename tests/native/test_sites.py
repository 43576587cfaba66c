"""The table of call sites alone: numbers, bounds, threads, and memory that fails."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.native_sources import ADDRESSES, CPP, compile_program, run_program

SOURCES = [Path(__file__).with_name("sites.cpp"), CPP / "ledger" / "sites.cpp"]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the program, compiled once for each set of flags."""

    @functools.cache
    def compiled(*flags: str) -> Path:
        return compile_program(tmp_path_factory.mktemp("sites") / "sites", SOURCES, *flags)

    return compiled


@pytest.mark.parametrize("seed", range(4))
def test_a_line_has_one_number_and_a_number_one_line(seed: int, sites: Callable[..., Path]) -> None:
    run_program(sites(*ADDRESSES), "random", str(seed))


@pytest.mark.parametrize("flags", [ADDRESSES, ("-fsanitize=thread",)])
def test_threads_agree_on_the_numbers(flags: tuple[str, ...], sites: Callable[..., Path]) -> None:
    run_program(sites(*flags), "threads", "8")


def test_each_bound_is_where_it_is_said_to_be(sites: Callable[..., Path]) -> None:
    run_program(sites(), "bounds")


def test_a_lack_of_memory_loses_one_line_once(sites: Callable[..., Path]) -> None:
    run_program(sites(*ADDRESSES), "memory")
