"""Print what ran on a GPU machine: versions, counts and exit codes; fail if anything failed or nothing ran."""

import importlib
import platform
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

MODULES = ("numpy", "rmm", "cupy", "warp")


def read_counts(report: Path) -> dict[str, int]:
    """Return pytest's counts from its JUnit report, those passed under tests/gpu apart; all zero if there is none."""
    counts = {"passed": 0, "passed in gpu": 0, "failed": 0, "skipped": 0}
    if not report.is_file() or not report.stat().st_size:
        return counts
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
            counts["passed in gpu"] += "gpu" in case.get("classname", "").split(".")
    return counts


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


def judge(counts: dict[str, int], pytest_code: int, demo_code: int) -> list[str]:
    """Return the findings: what failed, or did not run."""
    findings = []
    if not counts["passed in gpu"]:
        findings.append("no test under tests/gpu passed; see the log")
    if counts["failed"] or pytest_code:
        findings.append(f"pytest: {counts['failed']} failed, exit code {pytest_code}; see the log")
    if demo_code:
        findings.append(f"the demo ended with exit code {demo_code}; see the log")
    return findings


def main() -> int:
    """Print the table for JUNIT_XML PYTEST_EXIT_CODE DEMO_EXIT_CODE."""
    report, pytest_code, demo_code = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    counts = read_counts(report)
    rows = [("python", platform.python_version()), *((module, find_version(module)) for module in MODULES)]
    rows += find_gpus()
    rows += [(f"tests {name}", str(count)) for name, count in counts.items()]
    rows += [("pytest exit code", str(pytest_code)), ("demo exit code", str(demo_code))]
    findings = judge(counts, pytest_code, demo_code)
    rows.append(("result", "; ".join(findings) or "passed"))
    print("\n".join(f"| {name:19} | {value} |" for name, value in rows))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
