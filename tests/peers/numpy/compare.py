"""Run NumPy's own tests with and without the bridge, and compare what became of each.

python tests/peers/numpy/compare.py            # a selection, less than a minute
python tests/peers/numpy/compare.py --full     # all that `numpy.test()` runs
python tests/peers/numpy/compare.py --full --jobs 4 --backend managed --pool 3GiB --table peers.md   # on a GPU machine

With several jobs the test files are dealt out to as many processes on each side, which share the pool's size equally.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rmm_managed_bridge.units import parse_bytes

HERE = Path(__file__).parent
PACKAGE = Path(np.__file__).parent
SHORT = (
    "_core/tests/test_mem_policy.py",
    "_core/tests/test_mem_overlap.py",
    "_core/tests/test_multiarray.py::TestResize",
    "_core/tests/test_multiarray.py::TestMethods",
    "_core/tests/test_multiarray.py::TestCreation",
    "_core/tests/test_multiarray.py::TestAttributes",
    "_core/tests/test_multiarray.py::TestFromBuffer",
    "_core/tests/test_multiarray.py::TestIO",
    "_core/tests/test_multiarray.py::TestPickling",
    "_core/tests/test_multithreading.py",
    "_core/tests/test_regression.py",
    "_core/tests/test_item_selection.py",
    "_core/tests/test_umath.py::TestOut",
    "_core/tests/test_umath.py::TestSpecialMethods",
)
EXPLAINED = HERE / "explained.txt"


@dataclass
class Run:
    """What one run of NumPy's tests gave. `end` is empty if it did not come to its end."""

    outcomes: dict[str, list[str]] = field(default_factory=dict)
    end: dict[str, object] = field(default_factory=dict)
    output: str = ""


@dataclass(frozen=True)
class Difference:
    """A test that did not become the same."""

    test: str
    without: tuple[str, ...]
    with_bridge: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.test}: {' '.join(self.without) or 'not run'} -> {' '.join(self.with_bridge) or 'not run'}"


def start(tests: Sequence[str], backend: str, pool_bytes: int, folder: Path) -> tuple["subprocess.Popen[str]", Path]:
    """Start NumPy's tests in `folder`, away from this project's pytest settings."""
    folder.mkdir(parents=True)
    path = folder / "outcomes.jsonl"
    paths = [str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RMM_BRIDGE_", "PYTEST_"))},
        "PYTHONPATH": os.pathsep.join(paths),
        "PEERS_BACKEND": backend,
        "PEERS_POOL": str(pool_bytes or ""),
        "PEERS_OUTCOMES": str(path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder), "-p", "outcomes"]
    command += ["-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-profile", "np.test() profile"]
    with (folder / "output.txt").open("w") as output:
        started = subprocess.Popen(
            [*command, *(str(PACKAGE / each) for each in tests)],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return started, path


def deal(tests: Sequence[str], jobs: int) -> list[list[str]]:
    """Deal the tests out to `jobs` processes, whole files, the largest first to whom has least."""
    if jobs == 1:
        return [list(tests)]
    files = {
        str(path.relative_to(PACKAGE)): path.stat().st_size
        for test in tests
        for path in ([PACKAGE / test] if (PACKAGE / test).is_file() else sorted((PACKAGE / test).rglob("test_*.py")))
    }
    hands: list[list[str]] = [[] for _ in range(jobs)]
    weights = [0] * jobs
    for file in sorted(files, key=lambda file: -files[file]):
        least = weights.index(min(weights))
        hands[least].append(file)
        weights[least] += files[file]
    return [sorted(hand) for hand in hands if hand]


def read(path: Path) -> Run:
    """Return what a run has written."""
    run = Run(output=(path.parent / "output.txt").read_text(errors="replace")[-4000:])
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        found = json.loads(line)
        if "end" in found:
            run.end = found
        else:
            run.outcomes.setdefault(found["test"], []).append(found["outcome"])
    return run


def run_both(tests: Sequence[str], backend: str, timeout: float, jobs: int = 1, pool_bytes: int = 0) -> tuple[Run, Run]:
    """Run the tests without and with the bridge, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        hands = deal(tests, jobs)
        started = {
            side: [
                start(hand, side, pool_bytes // len(hands), Path(folder) / (side or "plain") / str(number))
                for number, hand in enumerate(hands)
            ]
            for side in ("", backend)
        }
        deadline = time.monotonic() + timeout
        processes = [process for each in started.values() for process, _ in each]
        try:
            for process in processes:
                process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            pass  # what has not ended is told by what it has not written
        finally:
            for process in processes:
                process.kill()
                process.wait()
        plain, bridged = (together([read(path) for _, path in each]) for each in started.values())
    return plain, bridged


def together(runs: Sequence[Run]) -> Run:
    """Return the runs of one side as one, which has ended if each of them has."""
    whole = Run(output="\n".join(run.output for run in runs if not run.end))
    for run in runs:
        for test, outcomes in run.outcomes.items():
            whole.outcomes.setdefault(test, []).extend(outcomes)
    if all(run.end for run in runs):
        whole.end = dict(runs[0].end)
        for name in ("blocks", "wrong_frees"):
            whole.end[name] = sum(int(str(run.end.get(name, 0))) for run in runs)
    return whole


def differences(plain: Run, bridged: Run) -> list[Difference]:
    """Return the tests whose outcomes differ, in order of their names."""
    return [
        Difference(test, before, after)
        for test in sorted(plain.outcomes.keys() | bridged.outcomes.keys())
        if (before := tuple(sorted(plain.outcomes.get(test, ()))))
        != (after := tuple(sorted(bridged.outcomes.get(test, ()))))
    ]


def explained() -> dict[str, str]:
    """Return the tests that are known to differ, each with its reason."""
    lines = [line for line in EXPLAINED.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {test.strip(): reason.strip() for test, _, reason in (line.partition(" | ") for line in lines)}


def table(plain: Run, bridged: Run, backend: str, found: Sequence[Difference], reasons: dict[str, str]) -> str:
    """Return how many tests became what on each side, and what differs, in markdown."""
    sides = {"without the bridge": plain, f"with the bridge, {backend}": bridged}
    counts = {
        name: Counter(outcome for each in run.outcomes.values() for outcome in each) for name, run in sides.items()
    }
    outcomes = sorted(set().union(*counts.values()))
    rows = [["NumPy's tests", *outcomes, "came to the end"]]
    rows.append(["---"] * len(rows[0]))
    rows += [
        [name, *(str(counts[name][outcome]) for outcome in outcomes), "yes" if run.end else "no"]
        for name, run in sides.items()
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", f"{len(found)} differ:" if found else "None differs."]
    lines += [f"- `{each}`: {reasons.get(each.test, 'not explained')}" for each in found]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return 1 if something differs that is not explained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all that numpy.test() runs")
    parser.add_argument("--backend", default="host", help="of the bridge (default: host)")
    parser.add_argument("--jobs", type=int, default=1, help="processes on each side (default: 1)")
    parser.add_argument("--pool", default="", help="size of all pools together, e.g. 3GiB; needed for managed memory")
    parser.add_argument("--table", type=Path, help="also write a short table in markdown to this file")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for both runs together")
    parser.add_argument("tests", nargs="*", help="paths below the numpy package, instead of the selection")
    given = parser.parse_args(arguments)
    tests = given.tests or ([""] if given.full else SHORT)
    pool_bytes = parse_bytes(given.pool, "--pool") if given.pool else 0
    if given.backend == "managed" and pool_bytes == 0:
        parser.error("--backend managed needs --pool")
    plain, bridged = run_both(tests, given.backend, given.timeout, given.jobs, pool_bytes)
    reasons = explained()
    found = differences(plain, bridged)
    for each in found:
        print(each, f"({reasons[each.test]})" if each.test in reasons else "(not explained)")
    for name, run in (("without", plain), ("with", bridged)):
        outcomes = [outcome for each in run.outcomes.values() for outcome in each]
        counts = ", ".join(f"{outcomes.count(each)} {each}" for each in sorted(set(outcomes)))
        print(f"{name} the bridge: {counts}; {run.end or 'did not end: ' + run.output}")
    if given.table is not None:
        given.table.write_text(table(plain, bridged, given.backend, found, reasons), encoding="utf-8")
    good = bool(plain.end and bridged.end and bridged.end["blocks"] and not bridged.end["wrong_frees"])
    return 0 if good and all(each.test in reasons for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
