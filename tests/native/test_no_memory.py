"""The core where its own memory runs out: every operator new fails in turn, in a program without Python."""

import subprocess
from pathlib import Path

import pytest
from fake_cuda import UNITS, cuda_include
from helpers.native_sources import CPP, one_unit

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(cuda_include() is None, reason="no cuda.h; pip install nvidia-cuda-runtime")


@pytest.mark.behaviour("M1")
def test_no_failure_ends_the_process_or_spoils_a_block(tmp_path: Path) -> None:
    library, program = tmp_path / "libfake.so", tmp_path / "no_memory"
    build = ["g++", "-std=c++20", "-O1", f"-isystem{cuda_include()}"]
    # With an operator new of its own: the fake driver is not what is short of memory.
    alone = ["-shared", "-fPIC", "-static-libstdc++", "-Wl,-Bsymbolic,--exclude-libs,ALL"]
    subprocess.run([*build, *alone, *map(str, UNITS), "-o", library], check=True)
    source = HERE / "no_memory.cpp"
    subprocess.run([*build, f"-I{CPP}", source, one_unit(tmp_path), "-o", program, "-pthread", "-ldl"], check=True)
    done = subprocess.run([program, library], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0 problems\n"), done.stderr[-4000:]
    rounds = int(done.stderr.split()[-2])
    assert rounds > 100, "places where the core asks for memory"
