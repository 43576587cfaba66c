"""A pytest plugin for other projects' tests: installs the bridge if asked, and writes what became of each test.

For each test it writes one line of JSON with the test's id and its outcome, and in the end one with totals.
Environment: ``PEERS_OUTCOMES``, the file; ``PEERS_BACKEND``, the backend to install, or nothing;
``PEERS_FRAMEWORKS``, what for; ``PEERS_POOL``, the size of its pool in bytes, or nothing; ``PEERS_SOURCES``, a folder
whose ``warp/`` is added to the package.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")


class Outcomes:
    """Collects the outcomes of one run."""

    def __init__(self, path: str, hooks: "Hooks | None") -> None:
        self._path = Path(path)
        self._path.touch()
        self._hooks = hooks
        self._worst: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._hooks is not None:
            self._hooks.put_again()

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
        end: dict[str, Any] = {"end": True, "blocks": 0, "wrong_frees": 0}
        if self._hooks is not None:
            end |= self._hooks.totals()
        self._write(end)

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:  # each at once: what a crash leaves tells where it was
            file.write(json.dumps(line) + "\n")


class Hooks:
    """The bridge, installed for these frameworks. Their tests set allocators, so it is put back before each test."""

    def __init__(self, backend: str, frameworks: list[str]) -> None:
        import rmm_managed_bridge as bridge

        self._bridge = bridge
        self._frameworks = frameworks
        self._again: list[Callable[[], None]] = []
        if "rmm" in frameworks:
            self._stand_under_rmms_adaptors()
            return
        pool_bytes = int(os.environ.get("PEERS_POOL") or 0)
        sizes = {"initial_pool_size": pool_bytes // 4, "maximum_pool_size": pool_bytes} if pool_bytes else {}
        bridge.install(backend, frameworks=frameworks, **sizes)
        if "cupy" in frameworks:
            import cupy

            ours = cupy.cuda.get_allocator()
            self._again.append(lambda: None if cupy.cuda.get_allocator() == ours else cupy.cuda.set_allocator(ours))
        if "warp" in frameworks:
            import warp

            mine = warp.get_device_allocator("cuda:0")
            self._again.append(lambda: warp.set_device_allocator("cuda:0", mine))

    def _stand_under_rmms_adaptors(self) -> None:
        """Let the bridge's resource be the current one, and the one that tests build their adaptors on.

        Without `install`: each test ends with `rmm.reinitialize()`, to device memory.
        """
        import rmm.mr

        resource = self._bridge.ManagedBridgeResource(
            rmm.mr.PoolMemoryResource(rmm.mr.ManagedMemoryResource(), initial_pool_size=1 << 29),
            maximum_pool_size="1GiB",
        )

        def make(*_: Any, **__: Any) -> Any:
            return resource

        make.__name__ = "CudaMemoryResource"  # which the ids of tests are made from
        rmm.mr.CudaMemoryResource = make  # type: ignore[assignment,misc]
        self._again.append(lambda: rmm.mr.set_current_device_resource(resource))

    def put_again(self) -> None:
        """Before each test."""
        for again in self._again:
            again()

    def totals(self) -> dict[str, int]:
        """Return how many blocks the frameworks got, and how many frees were wrong."""
        stats = self._bridge.stats()
        got = stats.by("framework")
        last = self._frameworks[-1]
        return {"blocks": got[last].total_count if last in got else 0, "wrong_frees": stats.foreign_frees}


def _name(report: pytest.TestReport) -> str:
    """Return an id that is the same in every run and on every machine."""
    # Outside pytest's root folder the node's own id has no path.
    return f"{'/'.join(Path(report.location[0]).parts[-3:])}::{_ADDRESS.sub('0x', report.nodeid.partition('::')[2])}"


def pytest_configure(config: pytest.Config) -> None:
    frameworks = os.environ["PEERS_FRAMEWORKS"].split(",")
    if "warp" in frameworks and os.environ.get("PEERS_SOURCES"):
        import warp

        warp.__path__.append(str(Path(os.environ["PEERS_SOURCES"]) / "warp"))
    backend = os.environ.get("PEERS_BACKEND", "")
    hooks = Hooks(backend, frameworks) if backend else None
    config.pluginmanager.register(Outcomes(os.environ["PEERS_OUTCOMES"], hooks))
