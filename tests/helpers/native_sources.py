"""The C++ of the pool, for programs that are tests: without Python, and compiled as they like."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fake_cuda import UNITS, cuda_include

CPP = Path(__file__).parents[2] / "rmm_managed_bridge" / "_native" / "cpp"
WARNINGS = ("-Wall", "-Wextra", "-Wno-missing-field-initializers")
ADDRESSES = ("-O0", "-fsanitize=address,undefined")  # of which -O0 compiles in a third of the time


def one_unit(folder: Path) -> Path:
    """Write one file with all of the pool but what belongs to the interpreter, which compiles faster than many."""
    sources = sorted(path for path in CPP.rglob("*.cpp") if path.parent.name != "entry")
    unit = folder / "pool.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    return unit


def compile_program(out: Path, sources: Sequence[Path], *flags: str) -> Path:
    """Compile `sources`, which are C++ or compiled, against the core's headers."""
    command = ["g++", "-std=c++20", "-O1", "-g", *WARNINGS, f"-isystem{cuda_include()}", f"-I{CPP}"]
    subprocess.run([*command, *flags, *map(str, sources), "-o", str(out), "-pthread", "-ldl"], check=True)
    return out


def fake_driver_alone(out: Path) -> Path:
    """Compile the fake driver with an operator new of its own: it is not what is short of memory."""
    alone = ["-shared", "-fPIC", "-static-libstdc++", "-Wl,-Bsymbolic,--exclude-libs,ALL"]
    return compile_program(out, UNITS, *alone)


def run_program(program: Path, *arguments: str, timeout: float | None = 120) -> str:
    """Run a program that tells of its problems; return what else it says. It fails where there is one."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    command = [str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=timeout)
    assert (done.returncode, done.stdout) == (0, "0 problems\n"), done.stderr[-4000:]
    return done.stderr
