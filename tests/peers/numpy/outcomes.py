"""A pytest plugin for NumPy's own tests: installs the bridge if asked, and writes what became of each test.

For each test it writes one line of JSON with the test's id and its outcome, and in the end one with totals.
Environment: ``PEERS_OUTCOMES``, the file; ``PEERS_BACKEND``, the backend to install, or nothing; ``PEERS_POOL``,
the size of its pool in bytes, or nothing.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")


class Outcomes:
    """Collects the outcomes of one run."""

    def __init__(self, path: str, backend: str) -> None:
        self._path = Path(path)
        self._path.touch()
        self._backend = backend
        self._worst: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            outcome = str(report.outcome) if report.when == "call" else f"{report.outcome} in {report.when}"
            self._worst[report.nodeid] = f"{outcome}, expected to fail" if hasattr(report, "wasxfail") else outcome
        if report.when == "teardown":
            self._write({"test": _name(report), "outcome": self._worst.pop(report.nodeid, "nothing")})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write({"test": report.nodeid, "outcome": f"{report.outcome} in collection"})

    def pytest_sessionfinish(self) -> None:
        end: dict[str, Any] = {"end": True, "numpy": np.__version__, "blocks": 0, "wrong_frees": 0}
        if self._backend:
            import rmm_managed_bridge as bridge

            stats = bridge.stats()
            end |= {"blocks": stats.total_count, "wrong_frees": stats.foreign_frees}
        self._write(end)

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:  # each at once: what a crash leaves tells where it was
            file.write(json.dumps(line) + "\n")


def _name(report: pytest.TestReport) -> str:
    """Return an id that is the same in every run and on every machine."""
    # Outside pytest's root folder the node's own id has no path.
    return f"{'/'.join(Path(report.location[0]).parts[-3:])}::{_ADDRESS.sub('0x', report.nodeid.partition('::')[2])}"


def pytest_configure(config: pytest.Config) -> None:
    backend = os.environ.get("PEERS_BACKEND", "")
    if backend:
        import rmm_managed_bridge as bridge

        pool_bytes = int(os.environ.get("PEERS_POOL") or 0) or None
        initial_bytes = pool_bytes if backend == "managed" else None
        bridge.install(
            backend,
            frameworks=["numpy"],
            numpy_scope="process",
            initial_pool_size=initial_bytes,
            maximum_pool_size=pool_bytes,
        )
    config.pluginmanager.register(Outcomes(os.environ["PEERS_OUTCOMES"], backend))
