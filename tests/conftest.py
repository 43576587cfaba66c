"""What tests may ask of the machine, and what every test must leave as it found it."""

import ctypes
import functools
import gc
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# `python -m pytest` puts the checkout into sys.path, where the package without its native part hides the installed one.
_ROOT = Path(__file__).parents[1]
if not (_ROOT / f"rmm_managed_bridge/_native/pool{sysconfig.get_config_var('EXT_SUFFIX')}").exists():
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != _ROOT]

MANAGED_LIMIT_BYTES = 4 << 30
_INSTALLED_AFTERWARDS = "the test left the bridge installed: uninstall it, or use `with bridge.installed(...)`"


@functools.cache
def count_gpus() -> int:
    """Return the number of CUDA devices, asked of the driver itself: the code under test may be wrong about it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _importable(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


REQUIREMENTS: dict[str, Callable[[], str | None]] = {
    "gpu": lambda: None if count_gpus() else "no CUDA device",
    "two_gpus": lambda: None if count_gpus() > 1 else "fewer than two CUDA devices",
    "no_gpu": lambda: "a CUDA device is present; tests/gpu has its own form of this" if count_gpus() else None,
    "cupy": lambda: _importable("cupy"),
    "warp": lambda: _importable("warp"),
    "torch": lambda: _importable("torch"),
}
"""Name to a function that returns why the requirement is not met here, or None."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"requires(name, ...): skip without these ({', '.join(REQUIREMENTS)}); fail if BRIDGE_REQUIRE names them",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    demanded = set(os.environ.get("BRIDGE_REQUIRE", "").replace(",", " ").split())
    if unknown := demanded - set(REQUIREMENTS):
        pytest.fail(f"BRIDGE_REQUIRE names {', '.join(sorted(unknown))}; it may name {', '.join(REQUIREMENTS)}")
    for name in _required(item):
        if name not in REQUIREMENTS:
            pytest.fail(f"requires({name!r}) is not one of {', '.join(REQUIREMENTS)}")
        reason = REQUIREMENTS[name]()
        if reason is not None and name in demanded:
            pytest.fail(f"{reason}, and BRIDGE_REQUIRE demands {name}")
        if reason is not None:
            pytest.skip(reason)


def _required(item: Any) -> list[str]:
    return [name for mark in item.iter_markers("requires") for name in mark.args]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call":
        item.stash[_outcome] = report.outcome
    return report


_outcome = pytest.StashKey[str]()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves the bridge installed, blocks alive, or its history recording every event."""
    for name in list(os.environ):
        if name.startswith("RMM_BRIDGE_") and name != "RMM_BRIDGE_DRIVER_LIBRARY":
            monkeypatch.delenv(name)
    before = _live_serials()
    yield
    install = sys.modules.get("rmm_managed_bridge.lifecycle.install")
    if install is None:
        return
    was_installed = install._bridge is not None
    if was_installed:
        install.uninstall()
    if request.node.stash.get(_outcome, "") != "passed":
        return  # its traceback keeps arrays alive, and it has been reported already
    if was_installed:
        pytest.fail(_INSTALLED_AFTERWARDS)
    gc.collect()
    left = [allocation for serial, allocation in _live_allocations().items() if serial not in before]
    if left:
        pytest.fail(f"the test left {len(left)} live blocks, among them: {left[0]}")


def _live_allocations() -> dict[int, Any]:
    ledger = sys.modules.get("rmm_managed_bridge._native.ledger")
    return {} if ledger is None else {allocation.serial: allocation for allocation in ledger.snapshot().allocations}


def _live_serials() -> frozenset[int]:
    return frozenset(_live_allocations())


@pytest.fixture
def make_heap(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Return ``make_heap(**options)``: heaps on host memory. They close with the test, which has freed all blocks."""
    from helpers.waiting import eventually

    from rmm_managed_bridge._native import ledger
    from rmm_managed_bridge._native import pool as native_pool

    heaps: list[Any] = []

    def make(**options: Any) -> Any:
        heaps.append(native_pool.host_pool(**options))
        return heaps[-1]

    yield make
    left = [each for each in ledger.snapshot().allocations if native_pool.pool_containing(each.ptr) in heaps]
    for allocation in left:
        native_pool.any_pool().deallocate(allocation.ptr)
    for heap in heaps:
        assert eventually(lambda heap=heap: heap.closed or heap.retire()), f"{heap} does not close"
    assert not left or request.node.stash.get(_outcome, "") != "passed", f"the test left blocks, among them: {left[0]}"


@pytest.fixture
def host_heap(make_heap: Callable[..., Any]) -> Any:
    """Return one heap of `make_heap`."""
    return make_heap()


@pytest.fixture
def numpy_as_before(host_heap: Any) -> Iterator[None]:
    """Have a host pool for the test, which leaves NumPy as it was in its context."""
    from helpers.programs import owned

    from rmm_managed_bridge._native import numpy_handler

    before = numpy_handler.current()
    yield
    assert numpy_handler.current() is before
    assert not owned()


class ManagedBudget:
    """How much managed memory one test has said it may hold."""

    def __init__(self) -> None:
        self.granted_bytes = 0

    def grant(self, size: int | str | None, what: str) -> None:
        """Refuse the test, unless `size` is stated, within 4 GiB with what it was granted before, and free on the card.

        Pool sizes count for each device.
        """
        from rmm_managed_bridge.units import format_bytes, parse_bytes

        if size is None:
            pytest.fail(f"{what}: state maximum_pool_size, so that the test is known to stay within 4 GiB")
        size_bytes = parse_bytes(size, what)
        if self.granted_bytes + size_bytes > MANAGED_LIMIT_BYTES:
            pytest.fail(
                f"{what}: {format_bytes(size_bytes)} and {format_bytes(self.granted_bytes)} before are more than the "
                f"{format_bytes(MANAGED_LIMIT_BYTES)} of managed memory that a test may hold"
            )
        if size_bytes > (free := free_device_bytes()):
            pytest.fail(f"{what}: {format_bytes(size_bytes)}, but only {format_bytes(free)} are free on the card")
        self.granted_bytes += size_bytes


def free_device_bytes() -> int:
    """Return the free memory of the current device; of the largest size there is where there is no device."""
    if not count_gpus():
        return 1 << 62
    from rmm._cuda.gpu import getDevice
    from rmm.mr import available_device_memory

    getDevice()
    return int(available_device_memory()[0])


@pytest.fixture(autouse=True)
def managed_bytes_limit(request: pytest.FixtureRequest) -> Iterator[ManagedBudget]:
    """Hold tests that require a GPU to 4 GiB of managed memory: what they ask for, and what their pools really took."""
    budget = ManagedBudget()
    yield budget
    provenance = sys.modules.get("rmm_managed_bridge.overview")
    if "gpu" in _required(request.node) and provenance is not None:
        reserved = sum(pool.reserved_bytes for pool in provenance.pools() if pool.kind == "managed")
        if reserved > MANAGED_LIMIT_BYTES:
            pytest.fail(f"{reserved} bytes of managed memory are reserved after the test; the limit is 4 GiB")


@pytest.fixture
def gpu_install(managed_bytes_limit: ManagedBudget) -> Callable[..., Any]:
    """Return ``gpu_install(bridge, **kwargs)``: ``bridge.install("managed", **kwargs)`` within the limit.

    Without `initial_pool_size` the test must have set RMM's resource itself. The larger of the two sizes counts.
    """

    def install(bridge: Any, **kwargs: Any) -> Any:
        from rmm_managed_bridge.units import parse_bytes

        sizes = [parse_bytes(kwargs[name], name) for name in _SIZES if kwargs.get(name) is not None]
        devices = kwargs.get("devices")
        count = count_gpus() if devices == "all" else len(devices) if isinstance(devices, (list, tuple)) else 1
        managed_bytes_limit.grant(max(sizes) * max(count, 1) if sizes else None, "gpu_install")
        return bridge.install(kwargs.pop("backend", "managed"), **kwargs)

    return install


_SIZES = ("initial_pool_size", "maximum_pool_size")
