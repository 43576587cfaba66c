"""Every allocation that is seen to come is seen to go, by whatever route: P5. tests/adapters has the frameworks."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.programs import HostMemory, recorded_events

import rmm_managed_bridge as bridge


class _OopsError(Exception):
    pass


NUMPY_ROUTES: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.empty(4096, "u1"),
    "dlpack": lambda: np.from_dlpack(bridge.as_dlpack(np.empty(4096, "u1"))),
    "dlpack, taken twice": lambda: np.from_dlpack(
        bridge.as_dlpack(np.from_dlpack(bridge.as_dlpack(np.empty(4096, "u1"))))
    ),
    "dlpack, never taken": lambda: bridge.as_dlpack(np.empty(4096, "u1")).__dlpack__(max_version=(1, 0)),
}


@pytest.fixture(params=[*NUMPY_ROUTES, "heap", pytest.param("resource", marks=pytest.mark.requires("no_gpu"))])
def route(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Return a function that makes an object which holds 4 KiB by one route and frees them when it goes."""
    if request.param in NUMPY_ROUTES:
        with bridge.installed("host", frameworks=["numpy"]):
            yield NUMPY_ROUTES[request.param]
        return
    memory = HostMemory()
    if request.param == "heap":
        pool = request.getfixturevalue("host_heap")
    else:
        pool = bridge.ManagedBridgeResource(memory.resource)

    class Buffer:
        def __init__(self) -> None:
            self.ptr = pool.allocate(4096)

        def __del__(self) -> None:
            pool.deallocate(self.ptr, 4096)

    yield Buffer


@pytest.mark.behaviour("P5")
def test_every_allocation_is_seen_to_go(route: Callable[[], Any]) -> None:
    def fail() -> None:
        kept = route()
        raise _OopsError(kept)

    with recorded_events(10_000):
        for _ in range(1_000):
            route()
        for _ in range(100):
            with pytest.raises(_OopsError):
                fail()
        gc.collect()
        events = bridge.history().events
    allocated = [event.serial for event in events if event.action == "allocate"]
    freed = [event.serial for event in events if event.action == "deallocate"]
    assert len(allocated) == 1_100
    assert sorted(freed) == allocated
    assert bridge.stats().current_count == 0
