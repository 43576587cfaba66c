"""Run other projects' own tests with and without the bridge, and compare what became of each.

python tests/peers/compare.py numpy                      # a selection, less than a minute
python tests/peers/compare.py numpy --full               # all that `numpy.test()` runs
python tests/peers/compare.py cupy warp rmm --sources DIR   # on a GPU; the READMEs here say how DIR is made
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    suite: Suite, tests: Sequence[str], backend: str, sources: Path | None, folder: Path
) -> tuple["subprocess.Popen[str]", Path]:
    """Start the tests in `folder`, away from this project's pytest settings."""
    folder.mkdir()
    path = folder / "outcomes.jsonl"
    root = suite.root(sources)
    paths = [str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RMM_BRIDGE_", "PYTEST_"))},
        "PYTHONPATH": os.pathsep.join(paths),
        "PEERS_BACKEND": backend,
        "PEERS_FRAMEWORKS": ",".join(suite.frameworks),
        "PEERS_OUTCOMES": str(path),
        "PEERS_SOURCES": "" if sources is None else str(sources),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder), "-p", "outcomes"]
    command += ["-p", "no:cacheprovider", *suite.options, *(str(root / each) for each in tests)]
    with (folder / "output.txt").open("w") as output:
        started = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )
    return started, path


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


def run_both(
    suite: Suite, tests: Sequence[str], backend: str, timeout: float, sources: Path | None = None
) -> tuple[Run, Run]:
    """Run the tests without and with the bridge: side by side on the host, one after the other on a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        try:
            for each in ("", backend):
                started.append(start(suite, tests, each, sources, Path(folder) / (each or "plain")))
                if backend != "host":
                    started[-1][0].wait(timeout / 2)
            for process, _ in started:
                process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass  # the run has no end then
        finally:
            for process, _ in started:
                process.kill()
                process.wait()
        runs = [read(path) for _, path in started]
    return runs[0], runs[1] if len(runs) > 1 else Run()


def differences(plain: Run, bridged: Run) -> list[Difference]:
    """Return the tests whose outcomes differ, in order of their names."""
    return [
        Difference(test, before, after)
        for test in sorted(plain.outcomes.keys() | bridged.outcomes.keys())
        if (before := tuple(sorted(plain.outcomes.get(test, ()))))
        != (after := tuple(sorted(bridged.outcomes.get(test, ()))))
    ]


def explained(suite: Suite) -> dict[str, str]:
    """Return the tests that are known to differ, each with its reason."""
    lines = [line for line in suite.explained.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {test.strip(): reason.strip() for test, _, reason in (line.partition(" | ") for line in lines)}


def compare(suite: Suite, tests: Sequence[str], backend: str, timeout: float, sources: Path | None) -> bool:
    """Compare, print, and return True if nothing differs that is not explained."""
    plain, bridged = run_both(suite, tests, backend, timeout, sources)
    reasons = explained(suite)
    found = differences(plain, bridged)
    for each in found:
        print(each, f"({reasons[each.test]})" if each.test in reasons else "(not explained)")
    print(f"{suite.name} without the bridge: {plain}\n{suite.name} with the bridge: {bridged}")
    good = bool(plain.end and bridged.end and bridged.end["blocks"] and not bridged.end["wrong_frees"])
    return good and all(each.test in reasons for each in found)


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
    parser.add_argument("--tests", nargs="*", help="paths instead of the selection, for one suite")
    given = parser.parse_args(arguments)
    verdicts = {}
    for name in given.suites:
        suite = SUITES[name]
        tests = given.tests or (suite.full if given.full else suite.tests)
        sources = None if given.sources is None else given.sources.resolve()
        verdicts[name] = compare(suite, tests, given.backend or suite.backend, given.timeout, sources)
    for name, good in verdicts.items():
        print(f"{name}: {'nothing differs that is not explained' if good else 'DIFFERENT, or a run did not end well'}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
