"""Fixtures for a real device. Pools are explicit and small: oversubscribed managed memory can hang a GPU for all."""

import contextlib
import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

POOL_SIZE = "512MiB"
MAXIMUM_POOL_SIZE = "2GiB"

_SPIN = r"""
extern "C" __global__ void spin_then_fill(long long clocks, float* data, float value, long long count) {
    long long start = clock64();
    while (clock64() - start < clocks) {}
    long long stride = gridDim.x * (long long)blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += stride)
        data[i] = value;
}
extern "C" __global__ void spin_then_copy(long long clocks, const float* from, float* to, long long count) {
    long long start = clock64();
    while (clock64() - start < clocks) {}
    long long stride = gridDim.x * (long long)blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += stride)
        to[i] = from[i];
}
"""
QUARTER_SECOND = 400_000_000  # device clocks, at 1.4 to 2 GHz


class Slow:
    """Kernels that do nothing for a while and then touch memory, so that a missing wait shows."""

    def __init__(self, cupy: ModuleType) -> None:
        module = cupy.RawModule(code=_SPIN)
        self._fill = module.get_function("spin_then_fill")
        self._copy = module.get_function("spin_then_copy")
        self._cupy = cupy
        # The first launch loads the module, which waits for the device and ends a capture in global mode.
        with cupy.cuda.using_allocator(None):
            one = cupy.zeros(1, "f4")
        self.fill(one, 0, clocks=0)
        self.copy(one, one, clocks=0)
        cupy.cuda.runtime.deviceSynchronize()

    def fill(self, array: Any, value: float, clocks: int = QUARTER_SECOND) -> None:
        np = self._cupy
        self._fill((64,), (256,), (np.int64(clocks), array, np.float32(value), np.int64(array.size)))

    def copy(self, source: Any, target: Any, clocks: int = QUARTER_SECOND) -> None:
        np = self._cupy
        self._copy((64,), (256,), (np.int64(clocks), source, target, np.int64(source.size)))


@pytest.fixture(scope="session")
def cupy() -> ModuleType:
    import cupy

    # CuPy imports SciPy now and then, where it is, and that all modules of NumPy's: some keep arrays for ever.
    for module in ("numpy.ma", "numpy.polynomial", "scipy.sparse", "scipy.special"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    free, _ = cupy.cuda.runtime.memGetInfo()
    assert free > 8 << 30, f"{free} bytes are free on the card; these tests want 8 GiB, of which they use at most 4"
    # The first launch of a kernel loads its module, which ends a capture in global mode.
    x = cupy.zeros(10, "f4")
    for other in (x, 1, cupy.ones(10, "f4")):
        cupy.add(x, other, out=x)
        x += other
        x *= other
    cupy.full(10, 3, "f4")
    cupy.cuda.runtime.deviceSynchronize()
    return cupy


@pytest.fixture(scope="session")
def warp() -> ModuleType:
    import warp

    warp.config.quiet = True
    warp.init()
    return warp


@pytest.fixture(scope="session")
def slow(cupy: ModuleType) -> Slow:
    return Slow(cupy)


@pytest.fixture
def rmm_pool() -> ModuleType:
    """RMM with a small pool of managed memory, and nothing installed."""
    import rmm

    import rmm_managed_bridge as bridge

    bridge.uninstall()
    gc.collect()
    rmm.reinitialize(
        pool_allocator=True, managed_memory=True, initial_pool_size=POOL_SIZE, maximum_pool_size=MAXIMUM_POOL_SIZE
    )
    return rmm


@pytest.fixture
def bridge(rmm_pool: ModuleType, cupy: ModuleType, warp: ModuleType) -> Iterator[ModuleType]:
    """The bridge, installed for NumPy, CuPy and Warp over RMM's managed pool."""
    import rmm_managed_bridge as bridge

    bridge.install(frameworks=["numpy", "cupy", "warp"])
    before = bridge.stats()
    yield bridge
    bridge.uninstall()
    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    after = bridge.stats()
    assert after.current_bytes <= before.current_bytes, bridge.snapshot()
    assert after.foreign_frees == before.foreign_frees


@pytest.fixture
def streams(cupy: ModuleType) -> Iterator[Callable[[], Any]]:
    """Return a function that makes streams. A capture that a test leaves on one would fail all tests after it."""
    made: list[Any] = []

    def make() -> Any:
        stream = cupy.cuda.Stream(non_blocking=True)
        made.append(weakref.ref(stream))
        return stream

    yield make
    for reference in made:
        stream = reference()
        if stream is not None and cupy.cuda.runtime.streamIsCapturing(stream.ptr):
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                cupy.cuda.runtime.streamEndCapture(stream.ptr)
