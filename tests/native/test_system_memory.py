"""System memory (HMM, ATS) on a device that reports access to it, and the refusals where it does not: D3, D5."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import rmm
from fake_cuda import FakeCuda
from fake_cuda.pool import MIB, Bench
from helpers.stub_pools import UnattachedPools

import rmm_managed_bridge as bridge
from rmm_managed_bridge import machine
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge.lifecycle import resource

pytestmark = pytest.mark.fake_driver

PAGEABLE = 88


class SystemMemory:
    """RMM's resource of that name, whose own wants the CUDA runtime."""


class Resource:
    """The bridge's resource, over a pool that knows the fake driver instead of RMM."""

    def __init__(self, upstream: Any, *, device: int, track: str, **settings: Any) -> None:
        del settings
        assert isinstance(upstream, SystemMemory)
        self.pool = native_pool.host_pool(ordered=True, device=device, kind="system", track=track)


@pytest.fixture
def install(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return ``install(pageable=...)`` for the system backend on the fake driver."""
    from rmm._cuda import gpu

    monkeypatch.setattr(sys.modules["rmm_managed_bridge.lifecycle.install"], "RmmPools", UnattachedPools)
    monkeypatch.setattr(rmm.mr, "SystemMemoryResource", SystemMemory)
    monkeypatch.setattr(resource, "ManagedBridgeResource", Resource)
    monkeypatch.setattr(gpu, "getDevice", lambda: 0)
    monkeypatch.setattr(gpu, "setDevice", lambda device: None)

    def install(*, pageable: bool) -> Any:
        fake.set_attribute(0, PAGEABLE, int(pageable))
        machine.device_traits.cache_clear()
        return bridge.installed("system", frameworks=["numpy"])

    yield install
    machine.device_traits.cache_clear()


def kind_of_new() -> tuple[str, int]:
    """Return kind and device of a new array."""
    record = bridge.allocation_of(np.ones(10))
    assert record is not None
    return record.kind, record.device


@pytest.mark.behaviour("D3")
def test_the_system_backend_serves_where_the_device_reports_pageable_access(install: Any) -> None:
    with install(pageable=True) as installed:
        assert installed.backend == "system"
        assert kind_of_new() == ("system", 0)
        array = np.ones(MIB, "u1")
        assert (bridge.memory_kind(array), bridge.can_access(0, array)) == ("system", True)
        for kind in ("system", None):
            with bridge.numpy_allocator(kind):
                assert kind_of_new() == ("system", 0)
        del array


@pytest.mark.behaviour("D3")
def test_it_is_refused_elsewhere_and_nothing_is_installed(install: Any) -> None:
    refusal = r"device 0 cannot use memory from the C library(.|\n)*no HMM or ATS"
    with pytest.raises(bridge.BackendError, match=refusal), install(pageable=False):
        pass
    assert not bridge.status().installed
    assert not bridge.owns(np.ones(10))


@pytest.mark.behaviour("D5")
def test_numpy_goes_to_system_memory_for_a_block_beside_another_pool(bench: Bench) -> None:
    system = native_pool.host_pool(ordered=True, device=0, kind="system")
    later = Bench(bench.fake)
    try:
        with bridge.numpy_allocator("system"):
            array = np.ones(MIB, "u1")
            assert native_pool.pool_containing(array.ctypes.data) is system
            with bridge.numpy_allocator("managed"):
                assert kind_of_new() == ("managed", 0)
        stream, ptr = later.owned(), array.ctypes.data
        system.hold(stream.handle, later.owners[stream])
        assert later.blocks.order(ptr, stream.handle)
        writer = bench.fake.enqueue(stream)
        del array
        with bridge.numpy_allocator("system"):
            others = [np.empty(MIB, "u1") for _ in range(8)]
            assert ptr not in [each.ctypes.data for each in others], "host order holds there too"
            bench.fake.finish(writer)
        del others
    finally:
        assert later.close()
        assert system.retire()


@pytest.mark.behaviour("D5")
def test_without_such_a_pool_it_says_what_to_do(bench: Bench) -> None:
    wanted = r"no pool of system memory(.|\n)*install\(backend='system'\)(.|\n)*SystemMemoryResource(.|\n)*HMM or ATS"
    with pytest.raises(bridge.InstallError, match=wanted), bridge.numpy_allocator("system"):
        pass
    with bridge.numpy_allocator():
        assert kind_of_new() == ("managed", bench.device)
