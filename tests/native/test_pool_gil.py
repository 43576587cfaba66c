"""No driver call that may block is made with the GIL held: the fake driver blames each, and every test on it asks.

A stream with some thousand operations waiting takes no more until one of them has ended, and a Python function at its
head waits for the GIL.
"""

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda, build
from fake_cuda.pool import KIB, MIB, Bench

import rmm_managed_bridge
from rmm_managed_bridge._native import torch_entry

pytestmark = pytest.mark.fake_driver
LIBRARY = Path(rmm_managed_bridge.__file__).parent / "_native" / "librmm_managed_bridge.so"


def test_the_fake_sees_calls_with_the_gil_held(fake: FakeCuda) -> None:
    """A check that cannot fail is no check: a driver call through ctypes.PyDLL keeps the GIL."""
    stream = fake.stream()
    event = ctypes.c_void_p()
    lib = ctypes.PyDLL(str(build()))
    assert lib.cuEventCreate(ctypes.byref(event), 0) == 0
    assert lib.cuEventRecord(event, ctypes.c_void_p(stream.handle)) == 0
    assert lib.cuEventSynchronize(event) == 0, "nothing to wait for"
    assert fake.violations() == ["cuEventRecord with the GIL held", "cuEventSynchronize with the GIL held"]
    fake.clear()
    fake.enqueue(stream, host=True)
    assert lib.cuEventRecord(event, ctypes.c_void_p(stream.handle)) == 0
    assert lib.cuEventSynchronize(event) != 0
    assert fake.violations()[-1] == (
        "cuEventSynchronize waits with the GIL held, and a Python function is queued: a deadlock"
    )
    fake.clear()


def test_each_way_to_an_event_lets_go_of_the_gil(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=64 * MIB)
    first, second, borrowed = bench.owned(), bench.owned(), bench.borrowed()

    def records(act: Any) -> int:
        before = fake.calls("cuEventRecord")
        act()
        return fake.calls("cuEventRecord") - before

    shown = bench.allocate(KIB, first)
    bench.expose(shown, second)
    assert records(lambda: bench.free(shown)) >= 2
    ptr = bench.allocate(KIB, borrowed)
    assert records(lambda: bench.free(ptr, borrowed)) == 1
    assert records(lambda: bench.free(bench.allocate(4 * MIB, cpu=True))) >= 2, "a full batch"
    ptr = bench.allocate(KIB, first)
    assert records(lambda: bench.order(ptr, second)) >= 1
    assert records(lambda: bench.blocks.synchronize(ptr)) >= 1
    bench.free(ptr, first)
    ptr = bench.allocate(32 * MIB, first)
    bench.free(ptr, first)
    assert records(lambda: bench.allocate(32 * MIB, second)) >= 1, "a bin of another stream"
    del bench.owners[first]
    assert records(bench.heap.drop_unused_streams) == 1
    assert fake.violations() == []
    assert bench.close()


class TorchPool:
    """PyTorch's MemPool: it calls with the GIL, under a lock that others wait for with the GIL."""

    def __init__(self, bench: Bench) -> None:
        self.guest = torch_entry.TorchEntry(lambda handle, device: None)
        self.guest.use(bench.device, bench.heap)
        native = ctypes.PyDLL(str(LIBRARY))
        self._malloc, self._free = native.bridge_torch_pool_malloc, native.bridge_torch_free
        self._malloc.restype = ctypes.c_void_p
        self._malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def malloc(self, size_bytes: int, stream: int) -> int | None:
        pointer: int | None = self._malloc(size_bytes, 0, stream)
        return pointer

    def free(self, ptr: int, size_bytes: int, stream: int) -> None:
        self._free(ptr, size_bytes, 0, stream)


def test_a_pool_of_pytorch_is_refused_what_it_would_have_to_wait_for(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB, wait_timeout_ms=20_000)
    torch, stream = TorchPool(bench), bench.owned()
    other = bench.owned()
    waits = bench.allocate(16 * MIB, stream)
    bench.expose(waits, other)
    fake.enqueue(other)
    bench.free(waits)
    begun = time.monotonic()
    assert torch.malloc(16 * MIB, stream.handle) is None
    assert time.monotonic() - begun < 10, "it has waited"
    fake.finish_all()
    ptr = torch.malloc(16 * MIB, stream.handle)
    assert ptr is not None, "PyTorch asks again"
    torch.free(ptr, 16 * MIB, stream.handle)
    assert bench.close()


def test_what_a_pool_of_pytorch_frees_waits_though_no_event_could_be_recorded(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=16 * MIB)
    torch, own, other = TorchPool(bench), bench.owned(), bench.owned()
    ptr = torch.malloc(16 * MIB, own.handle)
    assert ptr is not None
    bench.expose(ptr, other)
    operation = fake.enqueue(other)
    before = fake.calls("cuEventRecord")
    torch.free(ptr, 16 * MIB, own.handle)
    assert fake.calls("cuEventRecord") == before
    assert bench.allocate(16 * MIB, cpu=True) == ptr
    assert fake.done(operation), "the CPU has it before the stream has ended"
    assert bench.close()


class Dropping(bytes):
    """An owner of a stream: its memory goes back to the kernel, so that a dangling pointer to it is seen."""

    def __del__(self) -> None:
        self.when_dropped()  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["itself", "another thread"])
def test_streams_may_be_dropped_while_streams_are_dropped(fake: FakeCuda, way: str) -> None:
    """A destructor comes back into us, or lets go of the GIL as `cudaStreamDestroy` does."""
    bench = Bench(fake)
    dropped: list[int] = []
    inside, over = threading.Event(), threading.Event()

    def drop() -> None:
        dropped.append(bench.heap.drop_unused_streams())
        over.set()

    def when_dropped(self: Dropping) -> None:
        if way == "itself":
            dropped.append(bench.heap.drop_unused_streams())
        elif threading.current_thread() is threading.main_thread() and not inside.is_set():
            inside.set()
            over.wait(10)

    streams = [bench.borrowed() for _ in range(3)]
    owners = [Dropping(1 << 20) for _ in streams]
    Dropping.when_dropped = when_dropped  # type: ignore[attr-defined]
    for stream, owner in zip(streams, owners, strict=True):
        assert bench.heap.hold(stream.handle, owner)
    del owner
    other = threading.Thread(target=lambda: (inside.wait(10), drop()))
    if way == "another thread":
        other.start()
    owners.clear()
    dropped.append(bench.heap.drop_unused_streams())
    if way == "another thread":
        other.join()
    assert sum(dropped) == len(streams)
    assert not any(bench.heap.holds(stream.handle) for stream in streams)
    assert bench.close()
