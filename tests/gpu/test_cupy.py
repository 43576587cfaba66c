"""CuPy as a guest, phrase by phrase: streams, sizes, allocators, workspaces, raw kernels."""

import gc
import sys
import threading

import numpy as np
import pytest
from helpers.waiting import eventually

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]

MIB = 1 << 20
PER_THREAD = 2  # cudaStreamPerThread


def test_blocks_belong_to_the_stream_that_is_current(bridge, cupy, streams) -> None:
    first, second = streams(), streams()
    with first:
        a = cupy.empty(10)
        with second:
            b = cupy.empty(10)
        c = cupy.empty(10)
    d = cupy.empty(10)
    with cupy.cuda.Stream.ptds:
        e = cupy.empty(10)
    found = [bridge.allocation_of(x).stream for x in (a, b, c, d, e)]
    assert found == [first.ptr, second.ptr, first.ptr, cupy.cuda.get_current_stream().ptr, PER_THREAD]


@pytest.mark.behaviour("G2")
def test_per_thread_streams_do_not_share_blocks_too_early(bridge, cupy, slow) -> None:
    """G2: the handle is one, the streams are many; a second thread's fill comes after the first one's kernel."""
    count = 1 << 22
    results: list[bool] = []

    def second() -> None:
        with cupy.cuda.Device(0), cupy.cuda.Stream.ptds as stream:
            y = cupy.full(count, 2, "f4")
            stream.synchronize()
            results.append(bool((cupy.asnumpy(y) == 2).all()))

    with cupy.cuda.Stream.ptds as stream:
        x = cupy.zeros(count, "f4")
        slow.fill(x, 1)
        del x
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        stream.synchronize()
    assert results == [True]


@pytest.mark.parametrize(
    "size",
    [0, 1, 511, 512, 513, 4095, 65_537, MIB, 2 * MIB, 2 * MIB + 1, 33 * MIB, 257 * MIB, 1 << 30],
    ids=lambda size: f"{size} bytes",
)
def test_sizes_from_nothing_to_a_gibibyte(bridge, cupy, size) -> None:
    array = cupy.empty(size, "u1")
    assert array.nbytes == size
    if size:
        record = bridge.allocation_of(array)
        assert (record.requested_bytes, record.framework) == (size, "cupy")
        assert array.data.ptr % 512 == 0
        array[0], array[-1] = 1, 2
        assert (int(array[0]), int(array[-1])) == ((1, 2) if size > 1 else (2, 2))
        assert bridge.allocation_of(array.data.ptr + size - 1) == record
    else:
        assert bridge.allocation_of(array) is None
    del array
    bridge.trim()


_ENDS = r"""
extern "C" __global__ void put_ends(unsigned char* x, long long size) { x[0] = 1; x[size - 1] = 2; }
extern "C" __global__ void get_ends(const unsigned char* x, long long size, unsigned char* ends) {
    ends[0] = x[0];
    ends[1] = x[size - 1];
}
"""


def test_four_gibibytes_are_one_block_and_more_is_refused(rmm_pool, cupy, gpu_install) -> None:
    """From a pool of 4 GiB: that is all that a test may hold, so nothing else is there meanwhile."""
    import rmm_managed_bridge as bridge

    size = 1 << 32
    module = cupy.RawModule(code=_ENDS)
    put, get = module.get_function("put_ends"), module.get_function("get_ends")
    rmm_pool.reinitialize()  # the fixture's pool goes
    gc.collect()
    rmm_pool.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size=size, maximum_pool_size=size)
    gpu_install(bridge, frameworks=["cupy"], maximum_pool_size=size)
    try:
        array = cupy.empty(size, "u1")
        record = bridge.allocation_of(array)
        assert (record.requested_bytes, record.framework, record.kind) == (size, "cupy", "managed")
        assert bridge.allocation_of(array.data.ptr + size - 1) == record
        with cupy.cuda.using_allocator(None):
            ends = cupy.zeros(2, "u1")
        put((1,), (1,), (array, np.int64(size)))
        get((1,), (1,), (array, np.int64(size), ends))
        assert cupy.asnumpy(ends).tolist() == [1, 2]
        host = bridge.as_numpy(array)
        assert (host.size, host[0], host[-1]) == (size, 1, 2)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="cannot allocate"):
            cupy.empty(1, "u1")
        del array, host
        gc.collect()
        for too_much in (size + 1, size + 4096, 2 * size):
            with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="cannot allocate"):
                cupy.empty(too_much, "u1")
        assert float(cupy.ones(10).sum()) == 10
    finally:
        bridge.uninstall()
        gc.collect()
        rmm_pool.reinitialize()
    assert eventually(lambda: all(each.reserved_bytes < size for each in bridge.stats().pools))


def test_a_block_costs_no_python_object_beyond_cupys_own(bridge, cupy) -> None:
    def objects_of_each(make) -> float:
        for _ in range(100):
            make()
        kept = [None] * 1000
        gc.collect()
        before = sys.getallocatedblocks()
        for number in range(len(kept)):
            kept[number] = make()
        return (sys.getallocatedblocks() - before) / len(kept)

    array = cupy.empty(1000, "u1")
    assert type(array.data.mem) is cupy.cuda.memory.CFunctionAllocatorMemory

    def make_around_it():
        """An array, its pointer and its memory object, which is what CuPy has for each block of any allocator."""
        memory = cupy.cuda.UnownedMemory(array.data.ptr, 1000, None, 0)
        return cupy.ndarray(1000, "u1", cupy.cuda.MemoryPointer(memory, 0))

    least = objects_of_each(make_around_it)
    assert objects_of_each(lambda: cupy.empty(1000, "u1")) <= least + 0.1


def test_using_allocator_nests_inside_and_around(bridge, cupy) -> None:
    theirs = cupy.cuda.MemoryPool()
    kept = [cupy.ones(10)]
    with cupy.cuda.using_allocator(theirs.malloc):
        kept.append(cupy.ones(10))
        with cupy.cuda.using_allocator(bridge.cupy_allocator):
            kept.append(cupy.ones(10))
            with cupy.cuda.using_allocator(None):
                kept.append(cupy.ones(10))
            kept.append(cupy.ones(10))
        kept.append(cupy.ones(10))
    assert [bridge.owns(x) for x in kept] == [True, False, True, False, True, False]
    for x in kept:
        assert float(x.sum()) == 10


@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_set_allocator_in_any_order_with_install(rmm_pool, cupy, order) -> None:
    import rmm_managed_bridge as bridge

    before, live = cupy.cuda.get_allocator(), bridge.stats().current_count
    mine, yours = cupy.cuda.MemoryPool().malloc, cupy.cuda.MemoryPool().malloc
    try:
        if order != "after":
            cupy.cuda.set_allocator(mine)
        bridge.install(frameworks=["cupy"])
        ours = cupy.ones(1000)
        assert bridge.owns(ours)
        if order != "before":
            cupy.cuda.set_allocator(yours)
            theirs = cupy.ones(1000)
            assert not bridge.owns(theirs)
            with pytest.warns(bridge.BridgeWarning, match="CuPy's allocator was changed since"):
                bridge.uninstall()
            assert cupy.cuda.get_allocator() == yours
        else:
            bridge.uninstall()
            assert cupy.cuda.get_allocator() == mine
        assert float(ours.sum()) == 1000 and bridge.owns(ours)
        del ours
        gc.collect()
        assert bridge.stats().current_count == live
    finally:
        cupy.cuda.set_allocator(before)
        bridge.uninstall()


def transform(bridge, cupy, random) -> None:
    signal = random.random(1 << 20, np.float32).astype("c8")
    spectrum = bridge.as_numpy(cupy.fft.fft(bridge.as_cupy(signal)))
    cupy.fft.config.get_plan_cache().clear()
    expected = np.fft.fft(signal)
    assert np.abs(spectrum - expected).max() < 1e-3 * np.abs(expected).max()


def multiply(bridge, cupy, random) -> None:
    a, b = (random.random((2048, 2048), np.float32) for _ in range(2))
    assert np.allclose(bridge.as_numpy(bridge.as_cupy(a) @ bridge.as_cupy(b)), a @ b, rtol=1e-2)


def solve(bridge, cupy, random) -> None:
    a, b = (random.random((2048, 2048), np.float32) + 2000 * np.eye(2048, dtype="f4") for _ in range(2))
    found = bridge.as_numpy(cupy.linalg.solve(bridge.as_cupy(a), bridge.as_cupy(b)))
    assert np.allclose(found, np.linalg.solve(a, b), atol=1e-2)


def order(bridge, cupy, random) -> None:
    ordered = cupy.sort(bridge.as_cupy(random.random(1 << 21)))
    assert bool((ordered[1:] >= ordered[:-1]).all())


def draw(bridge, cupy, random) -> None:
    assert abs(float(cupy.random.rand(1 << 22).mean()) - 0.5) < 0.01


@pytest.mark.parametrize("work", [transform, multiply, solve, order, draw], ids=lambda work: work.__name__)
def test_results_of_libraries_come_from_the_pool(bridge, cupy, work) -> None:
    bridge.reset_peak()
    work(bridge, cupy, np.random.default_rng(0))
    assert bridge.stats().by("framework")["cupy"].peak_bytes >= 8 * MIB
    gc.collect()


def test_the_work_area_of_a_transform_lies_in_the_pool(bridge, cupy) -> None:
    from cupy.cuda import cufft

    count = 999_983  # a prime: the transform goes by way of a longer one
    signal = np.random.default_rng(0).random(count, np.float32).astype("c8")
    plan = cufft.Plan1d(count, cufft.CUFFT_C2C, 1)
    record = bridge.allocation_of(plan.work_area.ptr)
    assert (record.framework, record.site.file) == ("cupy", __file__)
    assert record.requested_bytes >= MIB
    spectrum = np.empty_like(signal)
    plan.fft(bridge.as_cupy(signal), bridge.as_cupy(spectrum), cufft.CUFFT_FORWARD)
    expected = np.fft.fft(signal)
    assert np.abs(bridge.as_numpy(spectrum) - expected).max() < 1e-3 * np.abs(expected).max()
    del plan
    gc.collect()
    assert bridge.allocation_of(record.ptr) is None


@pytest.mark.parametrize(
    ("work", "arrays", "least"),
    [
        # The copies of both matrices; then pivots, the status, and cuSOLVER's workspace.
        (solve, 2 * 16 * MIB, 4 * 2048 + 4 + 1),
        # The ordered copy; then what Thrust sorts in.
        (order, 16 * MIB, 8 * MIB),
    ],
    ids=["solve", "order"],
)
def test_workspaces_of_libraries_come_from_the_pool(bridge, cupy, work, arrays, least) -> None:
    """Block by block. cuBLAS takes its workspace itself: CuPy gives it none."""
    first = bridge.allocation_of(cupy.empty(1)).serial
    bridge.record_events(10_000)
    try:
        work(bridge, cupy, np.random.default_rng(0))
        events = [event for event in bridge.history() if event.action == "allocate" and event.serial > first]
    finally:
        bridge.record_events(1000, every_event=False)
    sizes = [event.requested_bytes for event in events if event.framework == "cupy"]
    assert {event.site.file for event in events if event.framework == "cupy"} == {__file__}
    assert sum(sizes) >= arrays + least, sizes
    gc.collect()


def test_raw_kernels_take_arrays_and_views(bridge, cupy) -> None:
    kernel = cupy.RawKernel(
        'extern "C" __global__ void add(const float* x, const float* y, float* z, int n) {'
        " int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) z[i] = x[i] + y[i]; }",
        "add",
    )
    x = bridge.as_cupy(np.arange(1000, dtype="f4"))
    y = cupy.ones(1000, "f4")
    z = np.zeros(1000, "f4")
    kernel((4,), (256,), (x, y, bridge.as_cupy(z), np.int32(1000)))
    assert (bridge.as_numpy(z) == np.arange(1, 1001)).all()
    plus = cupy.ElementwiseKernel("float32 a, float32 b", "float32 c", "c = a + 2 * b", "plus")
    assert (bridge.as_numpy(plus(x, y)) == np.arange(1000) + 2).all()


def test_the_line_of_a_block_is_the_users(bridge, cupy) -> None:
    made = [
        cupy.empty(10),
        cupy.arange(10) + 1,
        cupy.asarray(np.ones(10)),
        cupy.fft.fft(cupy.ones(16)),
        cupy.concatenate([cupy.ones(3), cupy.ones(4)]),
    ]
    lines = [bridge.allocation_of(x).site for x in made]
    assert {site.file for site in lines} == {__file__}
    assert len({site.line for site in lines}) == len(lines)
    cupy.fft.config.get_plan_cache().clear()


def test_threads_allocate_together_and_every_block_goes_back(bridge, cupy) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
            kept: list[tuple[object, float]] = []
            for step in range(300):
                value = float(seed * 1000 + step)
                kept.append((cupy.full(int(2 ** random.uniform(0, 20)), value, "f4"), value))
                if len(kept) > 4:
                    array, expected = kept.pop(int(random.integers(len(kept))))
                    if not bool((array == np.float32(expected)).all()):
                        failures.append(f"thread {seed}, step {step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_dlpack_between_cupy_arrays_shares_the_block(bridge, cupy) -> None:
    array = cupy.arange(1000, dtype="f4")
    live = bridge.stats().current_count
    shared = cupy.from_dlpack(array)
    assert shared.data.ptr == array.data.ptr and bridge.owns(shared)
    assert bridge.stats().current_count == live
    del array
    gc.collect()
    assert float(shared[77]) == 77
