"""NumPy from 8 bytes to 1 GiB, on the bridge against its own memory: one table in markdown.

python tests/bench/bench_numpy.py                                # the host backend
python tests/bench/bench_numpy.py --backend managed              # on a GPU machine, within 3 GiB
python tests/bench/bench_numpy.py --largest 64MiB --rounds 5

Inputs lie in the memory that is measured. A time is the best of all rounds, which take both in turn, for one call that
makes its result and drops it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from measure import as_time, best_ns

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.units import format_bytes, parse_bytes

SIZES = (8, 64, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20, 1 << 30)
POOL_BYTES = 3 << 30  # of managed memory; without the chains, the largest row takes 2 GiB
LIMIT = 1.25
MEASURE_SECONDS = 0.02


def works(size_bytes: int) -> dict[str, Callable[[], object]]:
    """Return what is measured with arrays of this size, float32 where there is arithmetic."""
    count = size_bytes // 4
    x = np.random.default_rng(7).random(count, np.float32)
    half = x[: count // 2]
    return {
        "`np.empty`": lambda: np.empty(size_bytes, "u1"),
        "`np.zeros`": lambda: np.zeros(size_bytes, "u1"),
        "`np.ones`": lambda: np.ones(count, np.float32),
        "`x * 2 + 1`": lambda: x * 2 + 1,
        "`x * x - x / 2`": lambda: x * x - x / 2,
        "`np.concatenate`": lambda: np.concatenate((half, half)),
        "`np.sort`": lambda: np.sort(x),
    }


def measure(work: Callable[[], object]) -> float:
    """Return nanoseconds a call, from about as many calls as fit into `MEASURE_SECONDS`."""
    work()
    start = time.perf_counter()
    work()
    once = time.perf_counter() - start
    if once > MEASURE_SECONDS:
        return once * 1e9
    return best_ns(work, max(int(MEASURE_SECONDS / 4 / max(once, 1e-7)), 1), 4)


def fitting(size_bytes: int, pool_bytes: int | None) -> set[str]:
    """Return the work that the pool has room for: the input, and what a chain holds at once."""
    names = set(works(8))
    if pool_bytes is not None and 4 * size_bytes > pool_bytes:
        names -= {name for name in names if "x *" in name}
    return names


def measure_both(
    sizes: Sequence[int],
    pool_bytes: int | None,
    ours: dict[tuple[str, int], float],
    theirs: dict[tuple[str, int], float],
) -> None:
    """Measure everything once, in turn on the bridge and on NumPy's own memory, and keep what is better than before."""
    for size_bytes in sizes:
        bridges = works(size_bytes)
        capsule = numpy_handler.set_current(None)
        plain = works(size_bytes)
        for name in plain:
            if name not in fitting(size_bytes, pool_bytes):
                continue
            key = name, size_bytes
            theirs[key] = min(measure(plain[name]), theirs.get(key, float("inf")))
            numpy_handler.set_current(capsule)
            ours[key] = min(measure(bridges[name]), ours.get(key, float("inf")))
            numpy_handler.set_current(None)
        numpy_handler.set_current(capsule)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="host", choices=("host", "managed", "system"))
    parser.add_argument("--largest", default="1GiB", help="leave out larger arrays (default: 1GiB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--track", default="sites", choices=("sites", "counters", "off"))
    given = parser.parse_args()
    largest = parse_bytes(given.largest, "--largest")
    sizes = [size_bytes for size_bytes in SIZES if size_bytes <= largest]
    pool: dict[str, Any] = {}
    if given.backend == "managed":
        pool = {"initial_pool_size": POOL_BYTES, "maximum_pool_size": POOL_BYTES}
    native_process.set_internal_files([str(Path(np.__file__).parent)])
    theirs: dict[tuple[str, int], float] = {}
    ours: dict[tuple[str, int], float] = {}
    # In context scope the switch between the two is one call; process scope costs the same (docs/performance.md).
    with bridge.installed(given.backend, frameworks=["numpy"], numpy_scope="context", track=given.track, **pool):
        for _ in range(given.rounds):
            measure_both(sizes, pool.get("maximum_pool_size"), ours, theirs)
    names = list(dict.fromkeys(name for name, _ in theirs))
    print(f"NumPy {np.__version__} on the {given.backend} backend, call sites: {given.track}.")
    print("Each cell: the bridge's time, and its ratio to NumPy's own; bold above 1.25.\n")
    print("|", " | ".join(["size", *names]), "|")
    print("|", " | ".join("---" for _ in range(len(names) + 1)), "|")
    for size_bytes in sizes:
        cells = [_cell(ours.get((name, size_bytes)), theirs.get((name, size_bytes))) for name in names]
        print("|", " | ".join([format_bytes(size_bytes), *cells]), "|")


def _cell(ours_ns: float | None, theirs_ns: float | None) -> str:
    if ours_ns is None or theirs_ns is None:
        return ""
    ratio = ours_ns / theirs_ns
    text = f"{as_time(ours_ns)}, {ratio:.2f}"
    return f"**{text}**" if ratio > LIMIT else text


if __name__ == "__main__":
    main()
