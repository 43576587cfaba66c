"""Warp as a guest, phrase by phrase: allocators, access, kernels of the CPU, captures, structures of its own."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]

DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def kernels(warp):
    """Kernels, which Warp compiles at their first launch."""
    from helpers import warp_kernels

    return warp_kernels


@pytest.fixture(scope="module")
def integrate(warp, kernels):
    """Return a computation of `warp.fem`. Its first run is over: that makes constants, which Warp keeps for ever."""
    from warp import fem

    def run() -> float:
        with warp.ScopedDevice(DEVICE):
            return fem.integrate(kernels.one, domain=fem.Cells(fem.Grid2D(res=warp.vec2i(8))))

    run()
    return run


@pytest.fixture
def zeros(warp):
    return lambda count=1000: warp.zeros(count, dtype=warp.float32, device=DEVICE)


def test_scoped_allocators_nest_and_end(bridge, warp, zeros) -> None:
    hooked = warp.get_device_allocator(DEVICE)
    kept = [zeros()]
    with warp.ScopedAllocator(DEVICE, warp.CudaManagedAllocator()):
        kept.append(zeros())
        with warp.ScopedAllocator(DEVICE, bridge.warp_allocator):
            kept.append(zeros())
            with warp.ScopedAllocator(DEVICE, None):
                kept.append(zeros())
            kept.append(zeros())
        kept.append(zeros())
    kept.append(zeros())
    assert [bridge.owns(x) for x in kept] == [True, False, True, False, True, False, True]
    assert warp.get_device_allocator(DEVICE) is hooked
    assert all((bridge.as_numpy(x) if bridge.owns(x) else x.numpy()).sum() == 0 for x in kept)


@pytest.mark.parametrize("order", ["before", "after"])
def test_setting_allocators_in_any_order_with_install(rmm_pool, cupy, warp, zeros, order) -> None:
    import rmm_managed_bridge as bridge

    theirs = warp.CudaManagedAllocator()
    live = bridge.stats().current_count
    try:
        if order == "before":
            warp.set_device_allocator(DEVICE, theirs)
        bridge.install(frameworks=["warp"])
        ours = zeros()
        assert bridge.owns(ours)
        if order == "after":
            warp.set_cuda_allocator(theirs)
            assert not bridge.owns(zeros())
            with pytest.warns(bridge.BridgeWarning, match="Warp's allocator on cuda:0 was changed since"):
                bridge.uninstall()
        else:
            bridge.uninstall()
        assert warp.get_device_allocator(DEVICE) is theirs
        assert bridge.owns(ours) and (bridge.as_numpy(ours) == 0).all()
        del ours
        gc.collect()
        assert bridge.stats().current_count == live
    finally:
        warp.set_cuda_allocator(None)
        bridge.uninstall()


def test_warps_allocator_over_rmm_and_ours_take_each_others_place(bridge, warp, zeros) -> None:
    """Each frees what it made, whichever is set by then. Over the bridge's resource both give from the one pool."""
    hooked = warp.get_device_allocator(DEVICE)
    over_rmm = warp.utils.AllocatorRmm()
    live = bridge.stats().current_count
    kept = {}
    try:
        kept["ours"] = zeros()
        warp.set_device_allocator(DEVICE, over_rmm)
        kept["over RMM"] = zeros()
        warp.set_device_allocator(DEVICE, bridge.warp_allocator)
        kept["ours again"] = zeros()
        with warp.ScopedAllocator(DEVICE, over_rmm):
            kept["over RMM again"] = zeros()
        for name, array in kept.items():
            record = bridge.allocation_of(array)
            assert record.framework == ("rmm" if "RMM" in name else "warp"), name
            assert array.memory_kind is warp.MemoryKind.CUDA_MANAGED and warp.can_access("cpu", array), name
            array.fill_(7.0)
            assert (bridge.as_numpy(array) == 7).all(), name
        del array
        del kept["over RMM"]
        gc.collect()
        assert bridge.stats().current_count == live + 3
        warp.set_device_allocator(DEVICE, over_rmm)
        for name in ("ours", "ours again", "over RMM again"):
            del kept[name]
        gc.collect()
        assert bridge.stats().current_count == live
    finally:
        kept.clear()
        warp.set_device_allocator(DEVICE, hooked)


def test_arrays_are_managed_and_the_cpu_may_work_on_them(bridge, warp, kernels, zeros) -> None:
    array = zeros()
    assert array.memory_kind is warp.MemoryKind.CUDA_MANAGED
    assert array[10:20].memory_kind is warp.MemoryKind.CUDA_MANAGED
    assert warp.can_access("cpu", array) and warp.can_access(DEVICE, array)
    alone = bridge.warp_allocator.__class__()
    with warp.ScopedAllocator(DEVICE, alone):
        assert zeros().memory_kind is warp.MemoryKind.CUDA_MANAGED, "as the driver says: nobody else knows"
    before = warp.config.launch_array_access_mode
    try:
        for mode in (warp.config.LaunchArrayAccessMode.CHECKED, warp.config.LaunchArrayAccessMode.RELAXED):
            warp.config.launch_array_access_mode = mode
            warp.launch(kernels.add_one, array.shape, inputs=[array], device=DEVICE)
            warp.synchronize_device(DEVICE)
            warp.launch(kernels.add_one, array.shape, inputs=[array], device="cpu")
    finally:
        warp.config.launch_array_access_mode = before
    assert (bridge.as_numpy(array) == 4).all()


def test_the_line_of_an_array_is_the_users(bridge, warp, zeros) -> None:
    made = [
        warp.zeros(10, dtype=float, device=DEVICE),
        warp.empty(10, dtype=warp.vec3, device=DEVICE),
        warp.full(10, 7.0, dtype=float, device=DEVICE),
        warp.array(np.ones(10), dtype=float, device=DEVICE),
        warp.from_numpy(np.ones(10), device=DEVICE),
        warp.clone(warp.ones(10, dtype=float, device=DEVICE)),
        warp.zeros_like(warp.ones(10, dtype=float, device=DEVICE)),
    ]
    sites = [bridge.allocation_of(x).site for x in made]
    assert {site.file for site in sites} == {__file__}
    assert len({site.line for site in sites}) == len(sites)
    assert {bridge.allocation_of(x).framework for x in made} == {"warp"}
    with bridge.tag("step"):
        tagged = warp.zeros(10, dtype=float, device=DEVICE, requires_grad=True)
    assert bridge.allocation_of(tagged).tag == bridge.allocation_of(tagged.grad).tag == "step"


@pytest.mark.behaviour("G4")
def test_arrays_from_before_are_used_in_a_capture(bridge, warp, kernels, zeros) -> None:
    array = zeros()
    warp.launch(kernels.add_one, array.shape, inputs=[array], device=DEVICE)  # compiled and loaded before
    count = bridge.stats().by("framework")["warp"].total_count
    with warp.ScopedCapture(DEVICE, force_module_load=False) as capture:
        warp.launch(kernels.add_one, array.shape, inputs=[array], device=DEVICE)
    for _ in range(10):
        warp.capture_launch(capture.graph)
    assert (bridge.as_numpy(array) == 11).all()
    assert bridge.stats().by("framework")["warp"].total_count == count


@pytest.mark.behaviour("G5")
def test_an_array_made_in_a_capture_is_refused_and_the_capture_lives(bridge, warp, kernels, zeros) -> None:
    array, gone = zeros(), zeros()
    warp.launch(kernels.add_one, array.shape, inputs=[array], device=DEVICE)
    with warp.ScopedCapture(DEVICE, force_module_load=False) as capture:
        warp.launch(kernels.add_one, array.shape, inputs=[array], device=DEVICE)
        with pytest.raises(bridge.BridgeError, match=r"cannot be allocated on stream .* while it is being captured"):
            warp.zeros(1000, dtype=warp.float32, device=DEVICE)
        del gone
        gc.collect()
        host = np.ones(1 << 20)
        warp.launch(kernels.add_one, array.shape, inputs=[array], device=DEVICE)
    warp.capture_launch(capture.graph)
    assert (bridge.as_numpy(array) == 3).all()
    (failure,) = [event for event in bridge.history().events if event.action == "failure"][-1:]
    assert (failure.framework, failure.site.file) == ("warp", __file__)
    assert host.sum() == 1 << 20


def test_structures_of_warps_own_are_not_disturbed(bridge, warp, kernels, integrate) -> None:
    """Bounding volumes, hash grids and the temporaries of `warp.fem`, which take memory in ways of their own."""
    points = np.random.default_rng(0).random((2000, 3), np.float32)
    on_device = warp.array(points, dtype=warp.vec3, device=DEVICE)
    counts = warp.zeros(len(points), dtype=warp.int32, device=DEVICE)
    grid = warp.HashGrid(32, 32, 32, device=DEVICE)
    for _ in range(3):
        grid.build(on_device, 0.1)
    warp.launch(kernels.count_near, len(points), inputs=[grid.id, on_device, 0.1, counts], device=DEVICE)
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    differing = (bridge.as_numpy(counts) != (distances <= 0.1).sum(1)).mean()
    assert differing < 0.01, "but for pairs that are 0.1 apart to the last bit"

    low, high = points - np.float32(0.02), points + np.float32(0.02)
    lowers, uppers = (warp.array(each, dtype=warp.vec3, device=DEVICE) for each in (low, high))
    bvh = warp.Bvh(lowers, uppers)
    bvh.refit()
    counts.zero_()
    warp.launch(kernels.count_overlaps, len(points), inputs=[bvh.id, lowers, uppers, counts], device=DEVICE)
    overlaps = ((low[:, None] <= high[None]) & (high[:, None] >= low[None])).all(2).sum(1)
    assert (bridge.as_numpy(counts) == overlaps).all()

    for _ in range(3):
        assert integrate() == pytest.approx(1)
    del bvh, grid
    gc.collect()


def test_threads_allocate_together_and_every_block_goes_back(bridge, warp, zeros) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        with warp.ScopedStream(warp.Stream(DEVICE)):
            kept = []
            for step in range(200):
                value = float(seed * 1000 + step)
                count = int(2 ** random.uniform(0, 18))
                kept.append((warp.full(count, value, dtype=warp.float32, device=DEVICE), value))
                if len(kept) > 4:
                    array, expected = kept.pop(int(random.integers(len(kept))))
                    if not (bridge.as_numpy(array) == np.float32(expected)).all():
                        failures.append(f"thread {seed}, step {step}")

    work(9)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
        thread.join()  # one after the other: Warp's current stream belongs to the device, not to the thread
    assert failures == []

    def allocate() -> None:
        for _ in range(500):
            zeros(100)

    threads = [threading.Thread(target=allocate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_allocate_at_once_keep_their_contents(bridge, warp, kernels) -> None:
    """On the one stream that Warp has for the device, with arrays that other threads free."""
    count = 6
    warp.launch(kernels.add_one, 1, inputs=[warp.zeros(1, dtype=warp.float32, device=DEVICE)], device=DEVICE)
    gc.collect()
    live, frees = bridge.stats().current_count, bridge.stats().foreign_frees
    barrier = threading.Barrier(count, timeout=60)
    handed: list[tuple[Any, float]] = []
    failures: list[object] = []

    def check(array, value: float, where: str) -> None:
        if not (bridge.as_numpy(array) == np.float32(value)).all():
            failures.append(where)

    def work(seed: int) -> None:
        try:
            random = np.random.default_rng(seed)
            kept: list[tuple[Any, float]] = []
            barrier.wait()
            for step in range(150):
                value = float(seed * 1000 + step)
                array = warp.full(int(2 ** random.uniform(0, 16)), value, dtype=warp.float32, device=DEVICE)
                if step % 3 == 0:
                    warp.launch(kernels.add_one, array.shape, inputs=[array], device=DEVICE)
                    value += 1
                kept.append((array, value))
                del array
                if len(kept) > 4:
                    check(*kept.pop(int(random.integers(len(kept)))), f"thread {seed}, step {step}")
                if step % 10 == 0:
                    handed.append(kept.pop())
                    if len(handed) > 2 * count:
                        check(*handed.pop(0), f"thread {seed}, step {step}: of another thread")
            for array, value in kept:
                check(array, value, f"thread {seed}, at its end")
        except BaseException as error:  # reported by the main thread
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for array, value in handed:
        check(array, value, "handed over and left")
    del array
    handed.clear()
    gc.collect()
    assert failures == []
    assert (bridge.stats().current_count, bridge.stats().foreign_frees) == (live, frees)


def test_arrays_on_two_streams_of_warp_are_recorded_and_ordered(bridge, warp, zeros, slow, cupy) -> None:
    side = warp.Stream(DEVICE)
    with warp.ScopedStream(side):
        array = zeros(1 << 22)
    assert bridge.allocation_of(array).stream == side.cuda_stream
    with cupy.cuda.Stream.from_external(side):
        slow.fill(
            cupy.ndarray(1 << 22, "f4", cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(array.ptr, 1 << 24, 0), 0)), 5
        )
    assert (bridge.as_numpy(array) == 5).all()
