"""Nothing the bridge does breaks a capture: its own refusals, other threads, other streams."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]
MODES = {"global": 0, "thread-local": 1, "relaxed": 2}  # cudaStreamCaptureMode
MIB = 1 << 20
QUARTER_SECOND = 400_000_000  # device clocks


@pytest.mark.behaviour("G4")
def test_a_graph_over_arrays_that_exist_replays(bridge, cupy, streams) -> None:
    with streams() as stream:
        a, b = cupy.zeros(1 << 22, "f4"), cupy.ones(1 << 22, "f4")
        stream.synchronize()
        count = bridge.stats().by("framework")["cupy"].total_count
        stream.begin_capture()
        cupy.add(a, b, out=a)
        graph = stream.end_capture()
        for step in range(10):
            b_host = bridge.as_numpy(b)
            b_host[:] = step
            graph.launch(stream)
            stream.synchronize()
        assert bridge.stats().by("framework")["cupy"].total_count == count
    assert (bridge.as_numpy(a) == sum(range(10))).all()


@pytest.mark.behaviour("G5")
def test_an_allocation_during_a_capture_is_refused_and_the_capture_lives(bridge, cupy, streams) -> None:
    with streams() as stream:
        a = cupy.zeros(1000, "f4")
        stream.synchronize()
        stream.begin_capture()
        a += 1
        with pytest.raises(bridge.BridgeError, match="being captured"):
            cupy.empty(1000, "f4")
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert (bridge.as_numpy(a) == 1).all()
    (failure,) = [event for event in bridge.history() if event.action == "failure"][-1:]
    assert failure.site.file == __file__


@pytest.mark.behaviour("G5")
def test_a_block_freed_during_a_capture_stays_until_it_ends(bridge, cupy, streams) -> None:
    with streams() as stream:
        a, b = cupy.zeros(1 << 20, "f4"), cupy.ones(1 << 20, "f4")
        address = b.data.ptr
        stream.synchronize()
        stream.begin_capture()
        cupy.add(a, b, out=a)
        del b
        gc.collect()
        others = [np.zeros(1 << 20, "f4") for _ in range(5)]
        assert address not in [other.ctypes.data for other in others]
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert (bridge.as_numpy(a) == 1).all()


def test_allocation_in_a_warp_capture_is_refused_and_the_capture_lives(bridge, warp) -> None:
    a = warp.zeros(1000, dtype=warp.float32, device="cuda:0")
    b = warp.ones(1000, dtype=warp.float32, device="cuda:0")
    warp.synchronize()
    with warp.ScopedCapture("cuda:0", force_module_load=False) as capture:
        warp.copy(a, b)
        with pytest.raises(bridge.BridgeError, match="being captured"):
            warp.empty(1000, dtype=warp.float32, device="cuda:0")
    warp.capture_launch(capture.graph)
    assert (bridge.as_numpy(a) == 1).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("where", ["same thread", "another thread"])
def test_everything_the_bridge_does_leaves_a_capture_alone(bridge, cupy, warp, rmm_pool, mode, blocking, where) -> None:
    """Modes by kinds of stream by threads, and all operations inside."""
    captured = cupy.cuda.Stream(non_blocking=not blocking)
    other, thief = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with captured:
        a = cupy.zeros(1000, "f4")
    with other:
        kept = [cupy.ones(3000, "f4") for _ in range(3)]
    exposed = np.ones(5000, "f4")
    with other:
        view = bridge.as_cupy(exposed)
    captured.synchronize()
    other.synchronize()
    problems: list[BaseException] = []

    def everything() -> None:
        nonlocal view, exposed
        try:
            cupy.cuda.Device(0).use()
            with bridge.numpy_allocator(), other:  # in context scope no other thread has the handler
                fresh = [cupy.empty(size, "u1") for size in (100, 10_000, 3 << 20, 40 << 20)]  # the last one grows
                fresh.append(bridge.as_cupy(np.ones(2000, "f4")))
                bridge.as_numpy(fresh[-1])
                np.ones(50_000)
                fresh.append(cupy.from_dlpack(bridge.as_dlpack(np.ones(2000, "f4"))))
                assert np.from_dlpack(bridge.as_dlpack(fresh[-1])).ctypes.data == fresh[-1].data.ptr
                fresh.append(bridge.as_warp(np.ones(2000, "f4")))
                assert bridge.as_numpy(fresh[-1]).ctypes.data == fresh[-1].ptr
                bridge.record_stream(fresh[-1], thief)
                bridge.record_stream(fresh[0], captured)
                with pytest.raises(bridge.BridgeError, match="being captured"):
                    bridge.as_numpy(fresh[0])
                kept.pop()
                del fresh
            buffer = rmm_pool.DeviceBuffer(size=1 << 20, stream=rmm_pool.pylibrmm.stream.Stream(obj=other))
            bridge.as_numpy(buffer)
            del buffer
            with thief:
                cupy.empty(3000, "f4")
            view = None
            exposed = None
            gc.collect()
            bridge.stats()
            bridge.snapshot()
            bridge.trim()
        except BaseException as error:  # reported by the main thread
            problems.append(error)

    with captured:
        captured.begin_capture(MODES[mode])
        cupy.add(a, 1, out=a)
    if where == "same thread":
        everything()
    else:
        thread = threading.Thread(target=everything)
        thread.start()
        thread.join()
    with captured:
        graph = captured.end_capture()
        graph.launch(captured)
    captured.synchronize()
    assert problems == []
    assert (bridge.as_numpy(a) == 1).all()


@pytest.fixture
def tight(rmm_pool, cupy, slow, gpu_install):
    """The bridge, installed for CuPy with little memory."""
    import rmm_managed_bridge as bridge

    gpu_install(bridge, frameworks=["cupy"], maximum_pool_size="64MiB")
    yield bridge
    bridge.uninstall()
    gc.collect()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("where", ["same thread", "another thread"])
def test_memory_that_lies_on_another_stream_is_stolen_during_a_capture(
    tight, cupy, slow, mode, blocking, where
) -> None:
    """Everything that is free was freed on one stream behind a slow kernel, and another one asks for it."""
    captured = cupy.cuda.Stream(non_blocking=not blocking)
    giver, thief = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with captured:
        a = cupy.zeros(1000, "f4")
    with thief:
        kept = [cupy.zeros(1000, "f4")]
    hoard: list[Any] = []
    with giver:
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            while True:
                hoard.append(cupy.empty(MIB // 4, "f4"))
        # Nothing else has memory for a block of this size now.
        assert len(hoard) > 40
    captured.synchronize()
    thief.synchronize()
    problems: list[BaseException] = []

    def steal() -> None:
        try:
            cupy.cuda.Device(0).use()
            with thief:
                kept.append(cupy.empty(MIB // 4, "f4"))
        except BaseException as error:  # reported by the main thread
            problems.append(error)

    with giver:
        for number in range(len(hoard)):
            slow.fill(hoard[number], 1, clocks=QUARTER_SECOND if number == 0 else 0)
    addresses = {each.data.ptr for each in hoard}
    with captured:
        captured.begin_capture(MODES[mode])
        cupy.add(a, 1, out=a)
    hoard.clear()
    if where == "same thread":
        steal()
    else:
        thread = threading.Thread(target=steal)
        thread.start()
        thread.join()
    with captured:
        graph = captured.end_capture()
        graph.launch(captured)
    assert problems == []
    assert kept[-1].data.ptr in addresses, "the memory came from elsewhere, and nothing was stolen"
    with thief:
        slow.fill(kept[-1], 2, clocks=0)
    for stream in (captured, giver, thief):
        stream.synchronize()
    assert (tight.as_numpy(kept[-1]) == 2).all(), "the thief did not wait for the kernel of the stream it stole from"
    assert (tight.as_numpy(a) == 1).all()
