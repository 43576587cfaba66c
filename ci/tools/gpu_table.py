"""Print what ran on a GPU machine: versions, counts and exit codes; fail if anything failed or nothing ran."""

import importlib
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

MODULES = ("numpy", "rmm", "cupy", "warp", "torch", "cuda.core")


NO_TESTS = 5  # pytest's exit code where a file has none


@dataclass
class Run:
    """What one pytest did: its name, exit code and counts. Without a report, as after a crash, all counts are zero."""

    name: str
    code: int
    seconds: int
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    on_gpu: bool = False

    @property
    def well(self) -> bool:
        """True if nothing failed, and it ended by itself."""
        return not self.failed and self.code in (0, NO_TESTS)


def read_runs(folder: Path) -> list[Run]:
    """Return the runs whose exit code and seconds are in NAME.code, with the counts of pytest's NAME.xml."""
    runs = []
    for written in sorted(folder.glob("*.code")):
        code, seconds = written.read_text().split()
        run = Run(written.stem, int(code), int(seconds))
        report = written.with_suffix(".xml")
        if report.is_file() and report.stat().st_size:
            for case in ElementTree.parse(report).getroot().iter("testcase"):
                count(run, case)
        runs.append(run)
    return runs


def count(run: Run, case: ElementTree.Element) -> None:
    """Add one test to its run."""
    if case.find("failure") is not None or case.find("error") is not None:
        run.failed += 1
    elif case.find("skipped") is not None:
        run.skipped += 1
    else:
        run.passed += 1
        run.on_gpu = run.on_gpu or "gpu" in case.get("classname", "").split(".")


def find_version(module: str) -> str:
    """Return the version of `module`, or why there is none."""
    try:
        return str(importlib.import_module(module).__version__)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"none ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"


def find_gpus() -> list[tuple[str, str]]:
    """Return rows with the driver's version and the name of each GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return [("driver", f"unknown ({type(error).__name__} from nvidia-smi)"), ("GPU", "unknown")]
    pairs = [line.split(", ", 1) for line in lines if ", " in line]
    return [("driver", pairs[0][0]), *(("GPU", pair[1]) for pair in pairs)] if pairs else [("driver", "no GPU listed")]


def judge(runs: list[Run], demo_code: int) -> list[str]:
    """Return the findings: what failed, or did not run."""
    findings = []
    if not any(run.on_gpu for run in runs):
        findings.append("no test under tests/gpu passed; see the log")
    findings += [f"{run.name}: {run.failed} failed, exit code {run.code}" for run in runs if not run.well]
    if demo_code:
        findings.append(f"the demo ended with exit code {demo_code}; see the log")
    return findings


def main() -> int:
    """Print the table for REPORTS_FOLDER DEMO_EXIT_CODE."""
    runs, demo_code = read_runs(Path(sys.argv[1])), int(sys.argv[2])
    for run in runs:
        counts = f"{run.passed:4} passed {run.failed:3} failed {run.skipped:3} skipped"
        print(f"| {run.name:24} | {counts} | {run.seconds:4} s | exit code {run.code} |")
    rows = [("python", platform.python_version()), *((module, find_version(module)) for module in MODULES)]
    rows += find_gpus()
    rows += [
        (f"tests {name}", str(sum(getattr(run, name) for run in runs))) for name in ("passed", "failed", "skipped")
    ]
    rows.append(("demo exit code", str(demo_code)))
    findings = judge(runs, demo_code)
    rows.append(("result", "; ".join(findings) or "passed"))
    print("\n".join(f"| {name:19} | {value} |" for name, value in rows))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
