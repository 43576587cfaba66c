"""Tests on the fake driver, run in a child process: a process loads one driver, once.

The modules marked `fake_driver` are collected as always. When the first item of such a module is due, one child runs
all selected items of the module and writes its reports to a file; the parent passes them on as its own. So outcomes,
tracebacks and captured output are counted and shown as for any test, and a child that crashes fails the tests it did
not get to, with what it said last.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CHILD = "BRIDGE_FAKE_CHILD"  # in the child: the file that its reports go to
LIMIT_SECONDS = 280  # below pytest's own limit for one test, so that the child's output is seen

_reports: dict[str, list[pytest.TestReport]] = {}
_ended: dict[Path, str] = {}


def in_child() -> bool:
    """Return True in the process that has the fake driver."""
    return CHILD in os.environ


def write(config: pytest.Config, report: pytest.TestReport) -> None:
    """In the child: append a report to the file."""
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    with Path(os.environ[CHILD]).open("a") as file:
        file.write(json.dumps(data) + "\n")


def pytest_command(items: list[str], config: pytest.Config) -> list[str]:
    """Return the command of a child: not from the current folder, which may hold a package without its native part."""
    options = ["-p", "no:cacheprovider", "-q", "--rootdir", str(config.rootpath), "-c", str(config.inipath)]
    return [sys.executable, "-P", "-X", "faulthandler", "-m", "pytest", *options, *items]


def run_module(item: pytest.Item) -> None:
    """Run all selected items of the module of `item` in a child, and keep their reports."""
    config = item.config
    items = [each.nodeid for each in item.session.items if each.path == item.path]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reports"
        file.touch()
        environment = {**os.environ, CHILD: str(file), "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        paths = [str(config.rootpath / nodeid) for nodeid in items]
        command = pytest_command(paths, config)
        try:
            child = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
            _ended[item.path] = f"exit code {child.returncode}\n{child.stdout[-3000:]}\n{child.stderr[-3000:]}"
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"")[-3000:].decode(errors="replace")
            _ended[item.path] = f"no end after {LIMIT_SECONDS} s\n{said}"
        for line in file.read_text().splitlines():
            report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
            if isinstance(report.longrepr, list):  # where and why a test was skipped; JSON has no tuples
                report.longrepr = tuple(report.longrepr)
            _reports.setdefault(report.nodeid, []).append(report)


def run_item(item: pytest.Item) -> None:
    """In the parent: report what the child reported."""
    if item.path not in _ended:
        run_module(item)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = _reports.get(item.nodeid, [])
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    if not {"setup", "teardown"} <= {report.when for report in reports}:
        text = f"the process with the fake driver ended before this test did: {_ended[item.path]}"
        _ended[item.path] = "see the first such test of this module"
        report = pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, "call", duration=0.0
        )
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
