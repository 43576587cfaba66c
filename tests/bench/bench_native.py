"""The hot path without Python: nanoseconds and instructions of an allocate-and-free pair on the host backend.

python tests/bench/bench_native.py        needs g++ and, for the instructions, valgrind
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.native_sources import CPP, one_unit
from measure import Row, print_rows

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "rmm_managed_bridge" / "_native"
TRACKS = ("off", "counters")


def build(folder: Path) -> Path:
    """Return the program, built as the package is."""
    found = subprocess.run([sys.executable, NATIVE / "find_headers.py"], capture_output=True, text=True, check=True)
    includes = [f"-isystem{include}" for include in found.stdout.strip().split(";")[2:]]
    program = folder / "native_pairs"
    sources = [Path(__file__).with_name("native_pairs.cpp"), one_unit(folder)]
    flags = ["-O3", "-DNDEBUG", "-std=c++20", f"-I{CPP}", *includes]
    subprocess.run(["g++", *flags, *sources, "-o", program, "-pthread", "-ldl"], check=True)
    return program


def time_ns(program: Path, threads: int, track: str, pairs: int = 2_000_000) -> float:
    """Return nanoseconds a pair and thread, the best of five runs."""
    runs = [
        subprocess.run([program, str(threads), str(pairs), track], capture_output=True, check=True) for _ in range(5)
    ]
    return min(float(run.stdout) for run in runs)


def instructions(program: Path, track: str, folder: Path) -> float:
    """Return instructions a pair: the slope between two counts, so that the start of the program is left out."""
    counts = {}
    for pairs in (1_000, 101_000):
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={folder / 'out'}",
            program,
            "1",
            str(pairs),
            track,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        counts[pairs] = int(re.findall(r"Collected : (\d+)", done.stderr)[0])
    return (counts[101_000] - counts[1_000]) / 100_000


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = build(folder)
        print_rows(
            "An allocate-and-free pair of 1 KiB on the host backend, native, one thread",
            [Row(f"ledger {track!r}", time_ns(program, 1, track), "the limit", 100.0, 1.0) for track in TRACKS],
        )
        if shutil.which("valgrind"):
            for track in TRACKS:
                print(f"ledger {track!r}: {instructions(program, track, folder):.0f} instructions a pair")


if __name__ == "__main__":
    main()
