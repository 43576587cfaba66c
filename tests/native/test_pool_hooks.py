"""CuPy's native entry points on the fake driver, called as CuPy's `CFunctionAllocator` calls them."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_cuda.pool import MIB, Bench

from rmm_managed_bridge._native import cupy_entry, ledger

pytestmark = pytest.mark.fake_driver


def no_call(*arguments: object) -> Any:
    """Stand for a function that must not be needed."""
    raise AssertionError(f"called with {arguments}")


def guest_of(bench: Bench, ask_stream: Callable[[int], int], hold_stream: Callable[..., Any] = no_call) -> Any:
    """Return CuPy's entry points on the heaps of `bench`, with a stub CuPy that has the streams."""
    guest = cupy_entry.CupyEntry(ask_stream, hold_stream, no_call)
    guest.use(bench.device, bench.heap)
    return guest


@pytest.mark.behaviour("S3")
def test_an_array_with_no_bytes_is_the_null_pointer(fake: FakeCuda) -> None:
    """S3, the hook's part: no pool bytes, no record, on either device; freeing null does nothing."""
    for device in range(2):
        bench = Bench(fake, device=device)
        guest = guest_of(bench, lambda device: 0)
        records = len(ledger.snapshot().allocations)
        assert guest.malloc(0, device) == 0
        guest.free(0, device)
        assert bench.heap.numbers[:4] == (0, 0, 0, 0)
        assert len(ledger.snapshot().allocations) == records
        assert bench.close()


def test_arrays_on_held_streams_reuse_and_order_memory(fake: FakeCuda) -> None:
    """CuPy's frees carry no stream: the block's own is held from its first block on."""
    bench = Bench(fake, limit_bytes=16 * MIB)
    current = bench.borrowed()

    def hold(handle: int, device: int) -> None:
        assert (handle, device) == (current.handle, 0)
        bench.adopt(current)

    guest = guest_of(bench, lambda device: current.handle, hold)
    ptr = guest.malloc(16 * MIB, 0)
    assert ledger.allocation_of(ptr).framework == "cupy"
    first = fake.enqueue(current)
    guest.free(ptr, 0)
    assert guest.malloc(16 * MIB, 0) == ptr, "same stream: at once"
    assert not fake.done(first)
    guest.free(ptr, 0)
    other = current = bench.borrowed()
    assert guest.malloc(16 * MIB, 0) == ptr
    assert fake.ordered(first, other) and not fake.done(first)
    guest.free(ptr, 0)
    assert bench.close()
