"""C++ code on the resource, without the GIL: recorded, host-ordered where it asks for that."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import rmm

import rmm_managed_bridge as bridge


@pytest.fixture
def resource() -> Iterator[bridge.ManagedBridgeResource]:
    """A bridge resource over C memory, as RMM's resource of device 0: that much works without a driver."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p

    def allocate(size: int, stream: object) -> int:
        return int(libc.malloc(ctypes.c_size_t(size)))

    def deallocate(ptr: int, size: int, stream: object) -> None:
        libc.free(ctypes.c_void_p(ptr))

    upstream = rmm.mr.CallbackMemoryResource(allocate, deallocate)
    made = bridge.ManagedBridgeResource(upstream)
    rmm.mr.set_per_device_resource(0, made)
    yield made
    rmm.mr.set_per_device_resource(0, upstream)
    _kept.append(upstream)  # RMM's C++ side holds its callbacks as bare pointers


_kept: list[Any] = []


@pytest.mark.requires("no_gpu")
@pytest.mark.behaviour("P1")
def test_threads_without_the_gil_are_recorded(callers: Any, resource: bridge.ManagedBridgeResource) -> None:
    bridge.record_events(limit=10_000)
    try:
        assert callers.use_from_threads(4, 500) == 2000
        events = [event for event in bridge.history() if event.action == "allocate"][-2000:]
    finally:
        bridge.record_events(limit=1000, every_event=False)
    assert {event.framework for event in events} == {"rmm"}
    assert {event.site.file for event in events} == {"native"}
    assert len({event.thread for event in events}) == 4
    assert resource.get_allocated_bytes() == 0


@pytest.mark.requires("no_gpu")
def test_the_synchronous_pair_gives_host_ordered_memory(callers: Any, resource: bridge.ManagedBridgeResource) -> None:
    ptr = callers.allocate_sync(ctypes.c_size_t(5000), ctypes.c_size_t(4096))
    assert ptr % 4096 == 0
    record = bridge.allocation_of(ptr)
    assert record is not None
    assert (record.requested_bytes, record.stream, record.framework) == (5000, 0, "rmm")
    ctypes.memset(ptr, 7, 5000)
    callers.deallocate_sync(ctypes.c_void_p(ptr), ctypes.c_size_t(5000), ctypes.c_size_t(4096))
    assert resource.get_allocated_bytes() == 0
    assert bridge.allocation_of(ptr) is None
