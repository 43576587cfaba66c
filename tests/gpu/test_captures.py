"""Captures and each other: two at once, views and frees inside, NumPy and other streams beside them."""

import gc
import threading

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # cudaStreamCaptureMode
MODES = {"global": GLOBAL, "thread-local": THREAD_LOCAL, "relaxed": RELAXED}
COUNT = 1 << 20


@pytest.mark.behaviour("G5")
@pytest.mark.parametrize("mode", MODES)
def test_two_captures_at_once_on_one_thread(bridge, cupy, streams, mode) -> None:
    pair = [streams(), streams()]
    arrays = []
    for stream in pair:
        with stream:
            arrays.append(cupy.zeros(COUNT, "f4"))
        stream.synchronize()
    for stream in pair:
        stream.begin_capture(MODES[mode])
    for stream, array in zip(pair, arrays, strict=True):
        with stream:
            cupy.add(array, 1, out=array)
            with pytest.raises(bridge.BridgeError, match="being captured"):
                cupy.empty(10)
    other = streams()
    with other:  # which is not captured
        free = cupy.full(COUNT, 3, "f4")
    beside = np.ones(40 << 20, "u1")  # grows
    # Not `stream.end_capture()`, which makes the graph executable: CUDA allows that only while no capture goes on.
    runtime = cupy.cuda.runtime
    graphs = [runtime.streamEndCapture(stream.ptr) for stream in pair]
    executables = [runtime.graphInstantiate(graph) for graph in graphs]
    for stream, executable, array in zip(pair, executables, arrays, strict=True):
        runtime.graphLaunch(executable, stream.ptr)
        stream.synchronize()
        assert (bridge.as_numpy(array) == 1).all()
    assert (bridge.as_numpy(free) == 3).all() and beside.all()


@pytest.mark.behaviour("G5")
@pytest.mark.parametrize("mode", ["thread-local", "relaxed"])
def test_two_captures_at_once_on_two_threads(bridge, cupy, streams, mode) -> None:
    """In global mode CUDA itself lets another thread's first kernel launch or event query end a capture."""
    barrier = threading.Barrier(2, timeout=60)
    problems: list[BaseException] = []
    warm = cupy.zeros(10, "f4")
    cupy.add(warm, 1, out=warm)

    def work(seed: int) -> None:
        try:
            cupy.cuda.Device(0).use()
            stream = streams()
            with stream:
                array = cupy.zeros(COUNT, "f4")
                gone = cupy.ones(COUNT, "f4")
                stream.synchronize()
                barrier.wait()
                stream.begin_capture(MODES[mode])
                barrier.wait()
                cupy.add(array, 1, out=array)
                with pytest.raises(bridge.BridgeError, match="being captured"):
                    cupy.empty(10)
                del gone
                assert np.ones(COUNT).all()
                barrier.wait()
                graph = stream.end_capture()
                barrier.wait()
                for _ in range(seed + 1):
                    graph.launch(stream)
                stream.synchronize()
            assert (bridge.as_numpy(array) == seed + 1).all()
        except BaseException as error:  # reported by the main thread
            problems.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@pytest.mark.parametrize("mode", MODES)
def test_views_in_a_capture_are_refused_or_made_and_it_lives(bridge, cupy, warp, streams, mode) -> None:
    captured, other = streams(), streams()
    host, shown = np.ones(COUNT, "f4"), np.ones(COUNT, "f4")
    with captured:
        array = cupy.zeros(COUNT, "f4")
        view = bridge.as_cupy(shown)
        captured.synchronize()
        captured.begin_capture(MODES[mode])
        cupy.add(array, view, out=array)
        with pytest.raises(bridge.BridgeError):
            bridge.as_cupy(host)  # for the captured stream
        for used in (array, view, shown):
            with pytest.raises(bridge.BridgeError, match="being captured"):
                bridge.as_numpy(used)
    with other:
        beside = bridge.as_cupy(host)
        beside += 1
    on_warp = bridge.as_warp(host)
    assert on_warp.shape == (COUNT,)
    graph = captured.end_capture()
    graph.launch(captured)
    captured.synchronize()
    assert (bridge.as_numpy(array) == 1).all()
    assert (bridge.as_numpy(beside) == 2).all()


@pytest.mark.behaviour("G5")
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
@pytest.mark.parametrize("mode", MODES)
def test_blocks_of_every_framework_let_go_in_a_capture(bridge, cupy, warp, rmm_pool, slow, mode, blocking) -> None:
    """They are kept from everybody until it has ended; what was captured reads them as they were."""
    captured = cupy.cuda.Stream(non_blocking=not blocking)
    rmm_stream = rmm_pool.pylibrmm.stream.Stream(obj=captured)
    with captured:
        result = cupy.zeros(COUNT, "f4")
        sources = {
            "cupy": cupy.full(COUNT, 1, "f4"),
            "numpy": np.full(COUNT, 2, "f4"),
            "warp": warp.full(COUNT, 4.0, dtype=warp.float32, device="cuda:0"),
            "rmm": rmm_pool.DeviceBuffer(size=4 * COUNT, stream=rmm_stream),
        }
        warp.synchronize_device("cuda:0")
        views = {name: bridge.as_cupy(x) for name, x in sources.items() if name != "rmm"}
        addresses = {views[name].data.ptr for name in views} | {sources["rmm"].ptr}
        captured.synchronize()
        captured.begin_capture(MODES[mode])
        for view in views.values():
            cupy.add(result, view, out=result)
        del view
        views.clear()
        sources.clear()
        gc.collect()
        fresh = [np.zeros(COUNT, "f4") for _ in range(6)]
        other = cupy.cuda.Stream(non_blocking=True)
        with other:
            fresh += [cupy.zeros(COUNT, "f4") for _ in range(6)]
        taken = {x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr for x in fresh}
        assert not taken & addresses
        graph = captured.end_capture()
        graph.launch(captured)
        captured.synchronize()
    assert (bridge.as_numpy(result) == 7).all()
    fresh.clear()
    bridge.trim()
    assert bridge.stats().quarantined_bytes == 0


def test_a_capture_that_nobody_ends_well_does_not_stop_the_pool(bridge, cupy, streams) -> None:
    """An invalidated capture (here by a wait of the program's own) ends in CuPy's error; the pool goes on."""
    stream = streams()
    with stream:
        array = cupy.zeros(COUNT, "f4")
        stream.synchronize()
        stream.begin_capture()
        cupy.add(array, 1, out=array)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            stream.synchronize()
        with pytest.raises(bridge.BridgeError, match="being captured"):
            cupy.empty(10)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            stream.end_capture()
        assert float(cupy.ones(10).sum()) == 10
    assert np.ones(COUNT).all()
