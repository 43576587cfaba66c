"""What the pool does by itself on a device: debug mode, the release threshold, and the limit of the quarantine."""

import gc
from typing import Any

import numpy as np
import pytest
from helpers.noting import for_ever, noting
from helpers.waiting import eventually

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]
MIB = 1 << 20


@pytest.fixture
def cleared(rmm_pool):
    """RMM's managed pool and nothing installed; what the test installs goes at its end."""
    import rmm_managed_bridge as bridge

    yield bridge
    bridge.uninstall()
    gc.collect()


def test_debug_mode_finds_a_kernel_that_writes_past_its_block(cleared, cupy, slow, gpu_install) -> None:
    gpu_install(cleared, frameworks=["numpy", "cupy"], pool="debug", maximum_pool_size="256MiB")
    with pytest.warns(cleared.BridgeWarning, match=r"of 4000 bytes .*cupy.* was written past its end") as said:
        array = cupy.zeros(1000, "f4")
        memory = cupy.cuda.UnownedMemory(array.data.ptr, 4004, array)
        longer = cupy.ndarray(1001, "f4", cupy.cuda.MemoryPointer(memory, 0))
        slow.fill(longer, 1, clocks=1000)
        del array, longer, memory
        assert eventually(lambda: cleared.stats() and len(said) == 1)
    assert str(said[0].message).endswith("first at byte 4000")


def test_debug_mode_leaves_right_programs_alone(cleared, cupy, slow, gpu_install, streams) -> None:
    gpu_install(cleared, frameworks=["numpy", "cupy", "warp"], pool="debug", maximum_pool_size="256MiB")
    before = cleared.stats().damaged_blocks
    for step in range(20):
        with streams():
            x = cupy.full(5000, step, "f4")
            slow.fill(x, 7, clocks=1_000_000)
            y = x + 1
            del x
            host = np.full(3000, step, "f4")
            z = cleared.as_cupy(host) * 2
            assert (cleared.as_numpy(y) == 8).all() and (cleared.as_numpy(z) == 2 * step).all()
    del y, z, host
    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    assert eventually(lambda: cleared.stats().reserved_bytes == 0)
    assert cleared.stats().damaged_blocks == before


def test_what_is_cached_above_the_threshold_goes_back_by_itself(cleared, cupy, gpu_install) -> None:
    gpu_install(cleared, frameworks=["numpy", "cupy"], release_threshold="64MiB", maximum_pool_size="1GiB")
    arrays = [cupy.ones(50 * MIB, "u1") for _ in range(6)] + [np.ones(50 * MIB, "u1")]
    assert cleared.stats().reserved_bytes >= 350 * MIB
    del arrays
    gc.collect()
    assert eventually(lambda: cleared.stats().cached_bytes <= 64 * MIB), cleared.stats()


def test_giving_back_leaves_captures_alone(cleared, cupy, gpu_install, streams) -> None:
    """The bridge's own thread frees managed memory while another thread captures, in the strictest mode."""
    gpu_install(cleared, frameworks=["numpy", "cupy"], release_threshold=0, maximum_pool_size="1GiB")
    with streams() as stream:
        a = cupy.zeros(1000, "f4")
        waste = [cupy.ones(50 * MIB, "u1") for _ in range(4)]
        stream.synchronize()
        stream.begin_capture(0)
        a += 1
        waste.clear()
        np.ones(50 * MIB, "u1")
        eventually(lambda: cleared.stats().cached_bytes <= 64 * MIB)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert (cleared.as_numpy(a) == 1).all()


def test_a_kernel_that_goes_on_and_on_is_said(cleared, cupy, slow, gpu_install, streams) -> None:
    gpu_install(cleared, frameworks=["numpy", "cupy"], maximum_pool_size="1GiB", maximum_quarantine_size="64MiB")
    with streams() as stream:
        x = cupy.zeros(1000, "f4")
        slow.fill(x, 1, clocks=6_000_000_000)  # three seconds, three times the patience
        with pytest.warns(cleared.BridgeWarning, match="of freed memory wait for device work that has not ended"):
            for _ in range(4):
                np.ones(50 * MIB, "u1")
        stream.synchronize()
    del x


def test_memory_runs_out_as_cupys_users_expect_and_on_oom_helps(cleared, cupy, gpu_install) -> None:
    kept = []

    def make_room(size_bytes: int, attempt: int) -> bool:
        kept.clear()
        return attempt == 1

    gpu_install(cleared, frameworks=["numpy", "cupy"], maximum_pool_size="256MiB", on_oom=make_room)
    kept.append(cupy.ones(200 * MIB, "u1"))
    fresh = cupy.ones(200 * MIB, "u1")
    assert not kept
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="of at most 256 MiB reserved"):
        cupy.ones(200 * MIB, "u1")
    del fresh
    with cleared.tag("small", limit="1MiB"), pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="tag 'small'"):
        cupy.ones(2 * MIB, "u1")


def test_synchronize_waits_for_held_streams(cleared, cupy, slow, gpu_install, streams) -> None:
    gpu_install(cleared, frameworks=["numpy", "cupy"], maximum_pool_size="256MiB")
    stream = streams()
    with stream:
        x = cupy.zeros(1000, "f4")
        slow.fill(x, 5)
    cleared.synchronize()
    assert stream.done
    del x


def test_upstream_sees_one_stream_which_is_the_bridges_own(cleared, cupy, warp, slow, gpu_install, rmm_pool) -> None:
    """Whatever streams the program works on, none of them reaches RMM's pool, nor what is below it."""
    from cuda.bindings import driver

    mr, calls = rmm_pool.mr, []
    before = mr.get_current_device_resource()
    below = noting(mr.ManagedMemoryResource(), "below the pool", calls)
    # At the exit its end would call Python.
    pool = for_ever(mr.PoolMemoryResource(below, initial_pool_size=32 * MIB, maximum_pool_size=1 << 30))
    mr.set_current_device_resource(for_ever(noting(pool, "above the pool", calls)))
    calls.clear()  # RMM's pool has taken its first piece, on a stream that it chose
    try:
        gpu_install(cleared, frameworks=["numpy", "cupy", "warp"], maximum_pool_size="1GiB")
        mine = [cupy.cuda.Stream(non_blocking=bool(number % 2)) for number in range(4)]
        mine += [cupy.cuda.Stream.null, cupy.cuda.Stream.ptds]
        kept: list[Any] = []
        for number, stream in enumerate(mine):
            with stream:
                kept.append(cupy.empty((20 + number) * MIB, "u1"))
                kept.append(cleared.as_cupy(np.ones(1000, "f4")))
                slow.fill(kept[-1], 1, clocks=1_000_000)
                rmms = rmm_pool.pylibrmm.stream.Stream(obj=stream)
                kept.append(rmm_pool.DeviceBuffer(size=5 * MIB, stream=rmms))
                del rmms
        kept.append(np.ones(50 * MIB, "u1"))
        with warp.ScopedDevice("cuda:0"):
            kept.append(warp.empty(40 * MIB, dtype=warp.uint8))
        handles = {stream.ptr for stream in mine} | {warp.get_stream("cuda:0").cuda_stream, 0, 1, 2}
        kept.clear()
        gc.collect()
        cupy.cuda.runtime.deviceSynchronize()

        def gave_back() -> bool:
            cleared.trim()
            return ("above the pool", "deallocate") in {call[:2] for call in calls}

        assert eventually(gave_back)
        seen = list(calls)
    finally:
        cleared.uninstall()
        mr.set_current_device_resource(before)
    assert {call[:2] for call in seen} >= {
        ("below the pool", "allocate"),
        ("above the pool", "allocate"),
        ("above the pool", "deallocate"),
    }
    (handle,) = {handle for place, _, handle in seen if place == "above the pool"}
    assert handle not in handles
    # RMM's pool passes a stream on to what is below it, or names none, which callbacks see as the legacy one.
    assert {handle for place, _, handle in seen if place == "below the pool"} <= {1, handle}
    error, flags = driver.cuStreamGetFlags(driver.CUstream(handle))
    assert error == driver.CUresult.CUDA_SUCCESS
    assert flags & driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
