"""The installed preset where no Python is asked: new blocks of RMM and its buffers, on the fake driver."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import rmm
from fake_cuda import GLOBAL, RELAXED, THREAD_LOCAL, FakeCuda, Prefetch
from fake_cuda.hints import FakeHints, hints_counted, using_installed
from fake_cuda.pool import MIB
from helpers.programs import HostMemory
from helpers.rmm_stream import rmm_stream

import rmm_managed_bridge as bridge

pytestmark = pytest.mark.fake_driver


@pytest.fixture(autouse=True)
def counts_at_zero(hints: FakeHints) -> None:
    """Each test reads `bridge.stats()` from zero, and asks where blocks are by way of the fake."""


@pytest.fixture
def resource(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[bridge.ManagedBridgeResource]:
    """A bridge resource over C memory that passes for managed memory, as RMM's resource of device 0."""
    from rmm_managed_bridge.lifecycle import resource

    monkeypatch.setattr(resource, "kind_of_resource", lambda mr: "managed")
    memory, before = HostMemory(), rmm.mr.get_per_device_resource(0)
    made = bridge.ManagedBridgeResource(memory.resource, device=0, populate=False)
    rmm.mr.set_per_device_resource(0, made)
    yield made
    rmm.mr.set_per_device_resource(0, before)
    _kept.append(memory)  # RMM's C++ side holds its callbacks as bare pointers


_kept: list[Any] = []


def test_a_buffer_of_rmm_is_prefetched_on_its_stream(fake: FakeCuda, resource: bridge.ManagedBridgeResource) -> None:
    stream = fake.stream()
    as_rmm = rmm_stream(stream)
    with using_installed("device:4MiB"):
        buffers = [rmm.DeviceBuffer(size=size * MIB, stream=as_rmm, mr=resource) for size in (3, 4)]
    buffers.append(rmm.DeviceBuffer(size=4 * MIB, stream=as_rmm, mr=resource))
    assert fake.prefetches() == [Prefetch(buffers[1].ptr, 4 * MIB, 0, stream.handle, 0)]
    assert hints_counted() == ({"prefetch": 1}, {})
    assert [bridge.residency(each).asked for each in buffers] == [None, "cuda:0", None]
    del buffers


def test_the_resource_in_python_prefetches_without_the_gil(
    fake: FakeCuda, resource: bridge.ManagedBridgeResource
) -> None:
    """A prefetch waits where the driver's queue is full, perhaps for a Python function that waits for the GIL."""
    stream = fake.stream()
    as_rmm = rmm_stream(stream)
    with using_installed("device"):
        ptr, small = resource.allocate(4 * MIB, as_rmm), resource.allocate(1000, as_rmm)
        assert resource.allocate(0, as_rmm) == 0
    assert fake.prefetches() == [Prefetch(ptr, 4 * MIB, 0, stream.handle, 0, gil_held=0)]
    resource.deallocate(ptr, 4 * MIB, as_rmm)
    resource.deallocate(small, 1000, as_rmm)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_buffer_asked_for_in_a_capture_is_refused_and_the_capture_lives(
    fake: FakeCuda, resource: bridge.ManagedBridgeResource, mode: int
) -> None:
    captured = fake.stream()
    as_rmm = rmm_stream(captured)
    with using_installed("device"):
        fake.begin_capture(captured, mode)
        with pytest.raises(RuntimeError, match="being captured"):
            rmm.DeviceBuffer(size=4 * MIB, stream=as_rmm, mr=resource)
        with pytest.raises(bridge.BridgeError, match="being captured"):
            resource.allocate(4 * MIB, as_rmm)
        buffer = rmm.DeviceBuffer(size=4 * MIB, mr=resource)
        assert fake.end_capture(captured)
    assert [each.low for each in fake.prefetches()] == [buffer.ptr]
    del buffer


def test_host_ordered_memory_has_no_stream_to_be_prefetched_on(
    fake: FakeCuda, callers: Any, resource: bridge.ManagedBridgeResource
) -> None:
    with using_installed("device"):
        ptr = callers.allocate_sync(ctypes.c_size_t(4 * MIB), ctypes.c_size_t(256))
    assert bridge.allocation_of(ptr).framework == "rmm"
    assert fake.calls("cuMemPrefetchAsync") == 0 and hints_counted() == ({}, {})
    callers.deallocate_sync(ctypes.c_void_p(ptr), ctypes.c_size_t(4 * MIB), ctypes.c_size_t(256))
