"""Threads on the real pool, and on NumPy's functions over it, under the sanitizers: programs without Python."""

import functools
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fake_cuda import UNITS, cuda_include
from helpers.native_sources import CPP, compile_program, one_unit, run_program

SANITIZERS = {"threads": "thread", "addresses": "address,undefined"}
LONG = os.environ.get("BRIDGE_STRESS_STEPS")  # 20000 and more; each test has a short form for CI


def compile_with(sanitizer: str, sources: Sequence[Path], out: Path, *flags: str) -> None:
    compile_program(out, sources, f"-fsanitize={sanitizer}", *flags)


def run(program: Path, *arguments: str) -> None:
    run_program(program, *arguments, timeout=None if LONG else 250)


pytestmark = pytest.mark.skipif(cuda_include() is None, reason="no cuda.h; pip install nvidia-cuda-runtime")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the pool compiled with a sanitizer, once for all programs that are linked to it."""

    @functools.cache
    def compiled(sanitizer: str) -> Path:
        folder = tmp_path_factory.mktemp(sanitizer)
        compile_with(SANITIZERS[sanitizer], [one_unit(folder)], folder / "pool.o", "-c")
        return folder / "pool.o"

    return compiled


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_share_the_pool_without_a_race(sanitizer: str, pool: Callable[[str], Path], tmp_path: Path) -> None:
    library, program = tmp_path / "libfake.so", tmp_path / "stress"
    compile_with(SANITIZERS[sanitizer], UNITS, library, "-shared", "-fPIC")
    compile_with(SANITIZERS[sanitizer], [Path(__file__).with_name("stress.cpp"), pool(sanitizer)], program)
    run(program, str(library), "4", LONG or "4000")


@pytest.mark.behaviour("N8")
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_call_numpys_functions_without_a_race(
    sanitizer: str, pool: Callable[[str], Path], tmp_path: Path
) -> None:
    program = tmp_path / "handler_stress"
    compile_with(SANITIZERS[sanitizer], [Path(__file__).with_name("handler_stress.cpp"), pool(sanitizer)], program)
    run(program, "16", LONG or "1500")


@pytest.mark.parametrize("sanitizer", [*SANITIZERS, None])
def test_a_lock_that_favours_its_owner_lets_one_thread_in(sanitizer: str | None, tmp_path: Path) -> None:
    program = tmp_path / "biased_lock"
    source = Path(__file__).with_name("biased_lock.cpp")
    if sanitizer is None:  # as fast as it gets: a fence that is missing shows only then
        subprocess.run(["g++", "-std=c++20", "-O3", f"-I{CPP}", source, "-o", program, "-pthread"], check=True)
    else:
        compile_with(SANITIZERS[sanitizer], [source], program)
    run(program, LONG or "1000")
