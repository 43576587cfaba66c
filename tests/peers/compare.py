"""Run other projects' own tests with and without the bridge, and compare what became of each.

python tests/peers/compare.py numpy                      # a selection, less than a minute
python tests/peers/compare.py numpy --full               # all that `numpy.test()` runs
python tests/peers/compare.py cupy warp rmm --sources DIR   # on a GPU; the READMEs here say how DIR is made
python tests/peers/compare.py numpy --full --jobs 4 --backend managed --pool 3GiB   # on a GPU

With several jobs the test files are dealt out to as many processes on each side, which share the pool's size equally.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rmm_managed_bridge.units import parse_bytes

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from suites import SUITES, Suite  # noqa: E402 - a script among its helpers, not a package


@dataclass
class Run:
    """What one run of the tests gave. `end` is empty if it did not come to its end."""

    outcomes: dict[str, list[str]] = field(default_factory=dict)
    end: dict[str, object] = field(default_factory=dict)
    output: str = ""

    def __str__(self) -> str:
        outcomes = [outcome for each in self.outcomes.values() for outcome in each]
        counts = ", ".join(f"{outcomes.count(each)} {each}" for each in sorted(set(outcomes)))
        return f"{counts}; {self.end or 'did not end: ' + self.output}"


@dataclass(frozen=True)
class Difference:
    """A test that did not become the same."""

    test: str
    without: tuple[str, ...]
    with_bridge: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.test}: {' '.join(self.without) or 'not run'} -> {' '.join(self.with_bridge) or 'not run'}"


def start(
    suite: Suite, tests: Sequence[str], backend: str, sources: Path | None, folder: Path, pool_bytes: int = 0
) -> tuple["subprocess.Popen[str]", Path]:
    """Start the tests in `folder`, away from this project's pytest settings."""
    folder.mkdir(parents=True)
    path = folder / "outcomes.jsonl"
    root = suite.root(sources)
    paths = [str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RMM_BRIDGE_", "PYTEST_"))},
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",  # some tests come in the order of a set, and depend on it
        "PEERS_BACKEND": backend,
        "PEERS_FRAMEWORKS": ",".join(suite.frameworks),
        "PEERS_OUTCOMES": str(path),
        "PEERS_POOL": str(pool_bytes or ""),
        "PEERS_SOURCES": "" if sources is None else str(sources),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder), "-p", "outcomes"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", *suite.options]
    command += [str(root / each) for each in tests]
    with (folder / "output.txt").open("w") as output:
        started = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )
    return started, path


def read(path: Path) -> Run:
    """Return what a run has written."""
    text = (path.parent / "output.txt").read_text(errors="replace")
    crash = text.find("Fatal Python error")
    run = Run(output=text[-4000:] if crash < 0 else text[crash - 500 : crash + 4000])
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        found = json.loads(line)
        if "end" in found:
            run.end = found
        else:
            run.outcomes.setdefault(found["test"], []).append(found["outcome"])
    return run


def deal(root: Path, tests: Sequence[str], jobs: int) -> list[list[str]]:
    """Deal the tests out to `jobs` processes, whole files, the largest first to whom has least."""
    if jobs == 1:
        return [list(tests)]
    files = {
        str(path.relative_to(root)): path.stat().st_size
        for test in tests
        for path in ([root / test] if (root / test).is_file() else sorted((root / test).rglob("test_*.py")))
    }
    hands: list[list[str]] = [[] for _ in range(jobs)]
    weights = [0] * jobs
    for file in sorted(files, key=lambda file: -files[file]):
        least = weights.index(min(weights))
        hands[least].append(file)
        weights[least] += files[file]
    return [sorted(hand) for hand in hands if hand]


def run_both(
    suite: Suite,
    tests: Sequence[str],
    backend: str,
    timeout: float,
    sources: Path | None = None,
    jobs: int = 1,
    pool_bytes: int = 0,
) -> tuple[Run, Run]:
    """Run the tests without and with the bridge: side by side on the host, one after the other on a GPU."""
    with tempfile.TemporaryDirectory() as name:
        hands = deal(suite.root(sources), tests, jobs)
        sides: list[list[tuple[subprocess.Popen[str], Path]]] = []
        deadline = time.monotonic() + timeout

        def wait() -> None:
            for process, _ in [each for side in sides for each in side]:
                process.wait(max(deadline - time.monotonic(), 0))

        try:
            for side in ("", backend):
                folder = Path(name) / (side or "plain")
                sides.append(
                    [
                        start(suite, hand, side, sources, folder / str(number), pool_bytes // len(hands))
                        for number, hand in enumerate(hands)
                    ]
                )
                if backend != "host":
                    wait()
            wait()
        except subprocess.TimeoutExpired:
            pass  # what has not ended is told by what it has not written
        finally:
            for process, _ in [each for side in sides for each in side]:
                process.kill()
                process.wait()
        runs = [together([read(path) for _, path in each]) for each in sides]
    return runs[0], runs[1] if len(runs) > 1 else Run()


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


def both_ran(plain: Run, bridged: Run) -> bool:
    """Return True if both came to their end, tests passed, and the bridge served them and got back what it gave.

    Two runs in which no test could start, say for want of a tool, are alike, too.
    """
    passed = all(any("passed" in outcomes for outcomes in run.outcomes.values()) for run in (plain, bridged))
    return bool(passed and plain.end and bridged.end and bridged.end["blocks"] and not bridged.end["wrong_frees"])


def explained(suite: Suite) -> dict[str, str]:
    """Return the tests that are known to differ, each with its reason."""
    lines = [line for line in suite.explained.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {test.strip(): reason.strip() for test, _, reason in (line.partition(" | ") for line in lines)}


def compare(
    suite: Suite, tests: Sequence[str], backend: str, timeout: float, sources: Path | None, jobs: int, pool_bytes: int
) -> bool:
    """Compare, print, and return True if nothing differs that is not explained."""
    plain, bridged = run_both(suite, tests, backend, timeout, sources, jobs, pool_bytes)
    reasons = explained(suite)
    found = differences(plain, bridged)
    for each in found:
        print(each, f"({reasons[each.test]})" if each.test in reasons else "(not explained)")
    print(f"{suite.name} without the bridge: {plain}\n{suite.name} with the bridge: {bridged}")
    return both_ran(plain, bridged) and all(each.test in reasons for each in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare each suite that is named; return 1 if something differs that is not explained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=sorted(SUITES), metavar="SUITE", help=", ".join(sorted(SUITES)))
    parser.add_argument(
        "--full", action="store_true", help="more than the selection; of numpy all that its test() runs"
    )
    parser.add_argument("--backend", help="of the bridge (default: host for numpy, else managed)")
    parser.add_argument("--sources", type=Path, help="where the tests of cupy, warp and rmm are")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for both runs of a suite together")
    parser.add_argument("--jobs", type=int, default=1, help="processes on each side (default: 1)")
    parser.add_argument("--pool", default="2GiB", help="size of a side's managed pools together (default: 2GiB)")
    parser.add_argument("--tests", nargs="*", help="paths instead of the selection, for one suite")
    given = parser.parse_args(arguments)
    verdicts = {}
    for name in given.suites:
        suite = SUITES[name]
        tests = given.tests or (suite.full if given.full else suite.tests)
        sources = None if given.sources is None else given.sources.resolve()
        backend = given.backend or suite.backend
        pool_bytes = 0 if backend == "host" else parse_bytes(given.pool, "--pool")
        verdicts[name] = compare(suite, tests, backend, given.timeout, sources, given.jobs, pool_bytes)
    for name, good in verdicts.items():
        print(f"{name}: {'nothing differs that is not explained' if good else 'DIFFERENT, or a run did not end well'}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
