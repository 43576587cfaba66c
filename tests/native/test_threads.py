"""Threads on the real pool under the sanitizers: stress.cpp, linked to nothing of Python."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers.fake_cuda import UNITS, cuda_include

NATIVE = Path(__file__).parents[2] / "rmm_managed_bridge" / "_native"
SANITIZERS = {"threads": "thread", "addresses": "address,undefined"}


def compile_with(sanitizer: str, sources: list[Path], out: Path, *flags: str) -> None:
    include = cuda_include()
    includes = [f"-isystem{include}"] if include else []
    command = ["g++", "-std=c++20", "-O1", "-g", f"-fsanitize={sanitizer}", f"-I{NATIVE}", *includes, *flags]
    subprocess.run([*command, *map(str, sources), "-o", str(out), "-pthread", "-ldl"], check=True)


@pytest.mark.skipif(cuda_include() is None, reason="no cuda.h; pip install nvidia-cuda-runtime")
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_share_the_pool_without_a_race(sanitizer: str, tmp_path: Path) -> None:
    library, program = tmp_path / "libfake.so", tmp_path / "stress"
    compile_with(SANITIZERS[sanitizer], UNITS, library, "-shared", "-fPIC")
    compile_with(SANITIZERS[sanitizer], [Path(__file__).with_name("stress.cpp")], program)
    steps = os.environ.get("BRIDGE_STRESS_STEPS", "4000")
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [str(program), str(library), "4", steps],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=250,
    )
    assert (done.returncode, done.stdout) == (0, "0 problems\n"), done.stderr[-4000:]
