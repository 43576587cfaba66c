"""The tests' own rules in conftest.py: what is skipped, what fails instead, and what no test may leave behind."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import builtins
import pytest
import rmm_managed_bridge as bridge

kept = []

@pytest.mark.requires("gpu")
def test_gpu():
    pass

@pytest.mark.requires("gpuu")
def test_misspelt():
    pass

def test_plain():
    pass

def test_leaves_it_installed():
    bridge.install("host", frameworks=["numpy"])

def test_after_that():
    assert not bridge.status().installed

def test_leaves_an_array():
    import numpy as np
    with bridge.installed("host", frameworks=["numpy"]):
        kept.append(np.ones(10))

def test_after_the_array():
    assert bridge.stats().current_count == 1

def test_leaves_a_block():
    from rmm_managed_bridge._native import pool as native_pool
    native_pool.host_pool().allocate(10)

class Recorder:
    def __init__(self):
        self.calls = []

    def install(self, backend, **sizes):
        self.calls.append((backend, sizes))

def install(gpu_install, **sizes):
    recorder = Recorder()
    try:
        gpu_install(recorder, **sizes)
    except BaseException:
        assert not recorder.calls
        raise
    assert recorder.calls == [("managed", sizes)]

def test_4_gib(gpu_install):
    install(gpu_install, initial_pool_size="64MiB", maximum_pool_size="4GiB")

def test_5_gib(gpu_install):
    install(gpu_install, initial_pool_size="1GiB", maximum_pool_size="5GiB")

def test_3_gib_on_two_devices(gpu_install):
    install(gpu_install, initial_pool_size="3GiB", devices=[0, 1])

def test_3_gib_twice(gpu_install):
    install(gpu_install, initial_pool_size="3GiB")
    install(gpu_install, initial_pool_size="3GiB")

def test_no_size(gpu_install):
    install(gpu_install)
"""


def outcomes(folder: Path, monkeypatch: pytest.MonkeyPatch, demand: str) -> dict[str, set[str]]:
    """Run `TESTS` under a copy of conftest.py where there is no GPU; return what became of each."""
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider --strict-markers\n")
    monkeypatch.setenv("BRIDGE_REQUIRE", demand)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    command = [sys.executable, "-P", "-m", "pytest", "-vv", "--tb=no", str(folder)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    found: dict[str, set[str]] = {}
    for line in result.stdout.splitlines():
        if line.startswith("test_it.py::"):
            name, outcome = line.removeprefix("test_it.py::test_").split()[:2]
            found.setdefault(name, set()).add(outcome)
    return found


EXPECTED = {
    "gpu": {"SKIPPED"},
    "misspelt": {"ERROR"},
    "plain": {"PASSED"},
    "leaves_it_installed": {"PASSED", "ERROR"},
    "after_that": {"PASSED"},
    "leaves_an_array": {"PASSED", "ERROR"},
    "after_the_array": {"PASSED"},
    "leaves_a_block": {"PASSED", "ERROR"},
    "4_gib": {"PASSED"},
    "5_gib": {"FAILED"},
    "3_gib_on_two_devices": {"FAILED"},
    "3_gib_twice": {"FAILED"},
    "no_size": {"FAILED"},
}


def test_requirements_skip_leaks_fail_and_too_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcomes(tmp_path, monkeypatch, "torch") == EXPECTED


def test_a_demanded_requirement_fails_instead_of_skipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(tmp_path, monkeypatch, "cupy,gpu") == EXPECTED | {"gpu": {"ERROR"}}


def test_an_unknown_demand_fails_every_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(tmp_path, monkeypatch, "gpus") == {name: {"ERROR"} for name in EXPECTED}
