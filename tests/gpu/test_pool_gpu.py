"""What the pool does by itself on a device: debug mode, the release threshold, and the limit of the quarantine."""

import gc

import numpy as np
import pytest
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
    gpu_install(cleared, frameworks=["numpy", "cupy"], pool="off", maximum_pool_size="256MiB")
    with pytest.warns(cleared.BridgeWarning, match=r"of 4000 bytes .*cupy.* was written behind its end") as said:
        array = cupy.zeros(1000, "f4")
        memory = cupy.cuda.UnownedMemory(array.data.ptr, 4004, array)
        longer = cupy.ndarray(1001, "f4", cupy.cuda.MemoryPointer(memory, 0))
        slow.fill(longer, 1, clocks=1000)
        del array, longer, memory
        assert eventually(lambda: cleared.stats() and len(said) == 1)
    assert str(said[0].message).endswith("first at byte 4000")


def test_debug_mode_leaves_right_programs_alone(cleared, cupy, slow, gpu_install, streams) -> None:
    gpu_install(cleared, frameworks=["numpy", "cupy", "warp"], pool="off", maximum_pool_size="256MiB")
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
