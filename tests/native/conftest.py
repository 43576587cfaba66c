"""Fixtures for the native core on the fake driver; see fake_cuda/child.py for how its tests are run."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from fake_cuda import child as fake_child
from fake_cuda.pool import Bench

_config: pytest.Config | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of modules that need the fake driver."""
    global _config
    _config = config  # `pytest_runtest_logreport` does not get it
    config.addinivalue_line("markers", "fake_driver: the module runs in a child process that loads the fake driver")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Let a child run the items of marked modules."""
    if fake_child.in_child() or item.get_closest_marker("fake_driver") is None:
        return None
    fake_child.run_item(item)
    # The item before may have left this folder set up for the items that the child has run.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the child, send each report to the parent."""
    if fake_child.in_child():
        assert _config is not None
        fake_child.write(_config, report)


@pytest.fixture
def fake() -> Iterator[fake_cuda.FakeCuda]:
    """The fake driver, with device 0 current. Fails the test for every lost capture, hang or crash it saw."""
    assert fake_child.in_child(), "mark the module with pytest.mark.fake_driver"
    driver = fake_cuda.load()
    driver.set_current(0)
    driver.reset()
    yield driver
    violations = driver.violations()
    driver.reset()
    assert not violations


@pytest.fixture
def bench(fake: fake_cuda.FakeCuda) -> Iterator[Bench]:
    """A pool on the fake device 0, emptied at the end."""
    bench = Bench(fake)
    yield bench
    bench.close()


@pytest.fixture
def hints(fake: fake_cuda.FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The room behind prefetch, advise and discard on the fake driver, with what reached it; all counts at zero."""
    from fake_cuda.hints import FakeHints

    from rmm_managed_bridge import machine
    from rmm_managed_bridge.hints import act, counters, driver

    room = FakeHints(fake)
    monkeypatch.setattr(driver, "load", lambda: room)
    monkeypatch.setattr(act, "_own_streams", {})
    counters.counts()  # takes what native code has counted
    for counter in (counters._done, counters._skipped):
        counter.clear()
    machine.device_traits.cache_clear()
    yield room
    machine.device_traits.cache_clear()


@pytest.fixture(scope="session")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """cpp_callers.cpp, built and loaded: C++ that uses RMM's current resource of device 0."""
    import rmm  # noqa: F401 - loads librmm, which the callers are linked to

    if fake_cuda.cuda_include() is None:
        pytest.skip("no CUDA headers; pip install nvidia-cuda-runtime nvidia-cuda-crt")
    native = Path(__file__).parents[2] / "rmm_managed_bridge" / "_native"
    command = [sys.executable, str(native / "find_headers.py")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(";")
    library = tmp_path_factory.mktemp("callers") / "callers.so"
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE"]
    source = Path(__file__).with_name("cpp_callers.cpp")
    librmm = f"{found[1]}/lib64/librmm.so"
    subprocess.run(
        ["g++", *flags, *[f"-isystem{folder}" for folder in found[2:]], source, librmm, "-o", library, "-pthread"],
        check=True,
    )
    loaded = ctypes.CDLL(str(library))
    loaded.use_from_threads.restype = ctypes.c_long
    loaded.allocate_sync.restype = ctypes.c_void_p
    return loaded
