"""The hot path in instructions, which unlike time are the same on a busy machine: 3 % more than last time is a failure.

Counted by `valgrind --tool=callgrind` as the slope between two numbers of rounds. They are of one compiler and one
Python; nothing is compared where these are others. A change that is worth what it costs writes down the new count.
"""

import math
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_cuda import cuda_include
from helpers.native_sources import compile_program, one_unit

BENCH = Path(__file__).parents[1] / "bench"
FEW, MANY = 1_000, 11_000
MOST = 1.03

# With g++ 12: an allocation of 1 KiB and its free on a host pool.
NATIVE_PAIR = {"off": 192, "counters": 407}
# With CPython 3.11 too: as a multiple of what it takes without the bridge. Where the code objects lie, which the kernel
# draws by lot, is worth 0.5 %. The second has two small blocks at once, and one of another size.
NUMPY = {'np.empty(1024, "u1")': 1.23, "x * 2": 1.27}

PROGRAM = """
import sys, numpy as np
rounds, installed = int(sys.argv[1]), sys.argv[2] == "True"
import rmm_managed_bridge as bridge
if installed:
    bridge.install(backend="host", frameworks=["numpy"], numpy_scope="process")
x = np.ones(10)
def work(rounds):
    for _ in range(rounds):
        {statement}
work(500)
if installed:
    bridge.stats()
work(rounds)
"""


def compiler() -> str:
    return (
        subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True)
        .stdout.partition(".")[0]
        .strip()
    )


pytestmark = [
    pytest.mark.skipif(shutil.which("valgrind") is None, reason="no valgrind"),
    pytest.mark.skipif(shutil.which("g++") is None or compiler() != "12", reason="the counts are those of g++ 12"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the counts are those of x86-64"),
]


def instructions(command: Sequence[str]) -> int:
    done = subprocess.run(
        ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *command],
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": ":".join(sys.path),
            "OPENBLAS_NUM_THREADS": "1",
        },
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


def slope(few: Sequence[str], many: Sequence[str]) -> float:
    with ThreadPoolExecutor(2) as both:
        least, most = both.map(instructions, (few, many))
    return (most - least) / (MANY - FEW)


@pytest.mark.skipif(cuda_include() is None, reason="no cuda.h; pip install nvidia-cuda-runtime")
def test_a_native_pair_takes_no_more_instructions(tmp_path: Path) -> None:
    program = compile_program(
        tmp_path / "pairs", [BENCH / "native_pairs.cpp", one_unit(tmp_path)], "-O3", "-g0", "-Wno-maybe-uninitialized"
    )
    for track, expected in NATIVE_PAIR.items():
        count = slope([str(program), "1", str(FEW), track], [str(program), "1", str(MANY), track])
        assert count <= expected * MOST, f"{track}: {count:.0f} instructions, {expected} before"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the count is that of CPython 3.11")
@pytest.mark.parametrize("statement", NUMPY)
def test_numpy_takes_no_more_instructions(tmp_path: Path, statement: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(statement=statement))
    subprocess.run([sys.executable, script, "1", "True"], check=True)  # which may compile what it imports

    def count(installed: bool) -> float:
        return slope(*([sys.executable, str(script), str(rounds), str(installed)] for rounds in (FEW, MANY)))

    # The bridge's thread looks at its pools now and then, and locks are not biased to this one for a while after.
    ratio = math.inf
    for _ in range(3):
        ratio = min(ratio, count(True) / count(False))
        if ratio <= NUMPY[statement] * MOST:
            return
    pytest.fail(f"{ratio:.3f} times the instructions of NumPy's own, {NUMPY[statement]} before")
