"""Nobody is handed memory that other work still touches: proved behind kernels that are slow on purpose."""

import gc
import threading

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]
COUNT = 1 << 22  # 16 MiB of float32


def test_as_numpy_waits_for_the_kernel(bridge, cupy, slow, streams) -> None:
    with streams():
        array = cupy.zeros(COUNT, "f4")
        slow.fill(array, 4)
    assert (bridge.as_numpy(array) == 4).all()


@pytest.mark.parametrize("blocking", [False, True])
def test_as_numpy_waits_for_a_recorded_stream(bridge, cupy, slow, blocking) -> None:
    array = cupy.zeros(COUNT, "f4")
    other = cupy.cuda.Stream(non_blocking=not blocking)
    cupy.cuda.get_current_stream().synchronize()
    bridge.record_stream(array, other)
    with other:
        slow.fill(array, 7)
    assert (bridge.as_numpy(array) == 7).all()


@pytest.mark.behaviour("G1")
def test_a_block_read_on_a_recorded_stream_is_not_reused_before(bridge, cupy, slow, streams) -> None:
    a, b = streams(), streams()
    with a:
        x = cupy.full(COUNT, 3, "f4")
        result = cupy.zeros(COUNT, "f4")
    a.synchronize()
    bridge.record_stream(x, b)
    with b:
        slow.copy(x, result)
    address = x.data.ptr
    del x
    with a:
        y = cupy.full(COUNT, 9, "f4")
    a.synchronize()
    assert y.data.ptr != address
    b.synchronize()
    assert (cupy.asnumpy(result) == 3).all()
    del y, result


@pytest.mark.behaviour("G3")
def test_numpy_does_not_get_a_block_that_a_kernel_writes(bridge, cupy, slow, streams) -> None:
    host = np.zeros(COUNT, "f4")
    address = host.ctypes.data
    stream = streams()
    with stream:
        device = bridge.as_cupy(host)
        bridge.record_stream(device, stream)
        slow.fill(device, 9, clocks=2_500_000_000)  # longer than 20 arrays take to fill
    del host, device
    gc.collect()
    assert bridge.stats().quarantined_bytes >= 16 << 20
    arrays = [np.zeros(COUNT, "f4") for _ in range(20)]
    assert address not in [array.ctypes.data for array in arrays]
    stream.synchronize()
    assert not any(array.any() for array in arrays)
    bridge.trim()
    assert bridge.stats().quarantined_bytes == 0


@pytest.mark.parametrize("count", [1 << 10, COUNT])
@pytest.mark.parametrize("blocking", [False, True])
def test_the_source_of_an_invisible_copy_is_not_overwritten(bridge, cupy, slow, count, blocking) -> None:
    """CudaMemcpyDefault out of managed memory returns at once and reads later, and no library tells of it."""
    stream = cupy.cuda.Stream(non_blocking=not blocking)
    with stream:
        target, before = cupy.zeros(count, "f4"), cupy.zeros(count, "f4")
        slow.fill(before, 1)
        host = np.full(count, 3, "f4")
        cupy.cuda.runtime.memcpyAsync(target.data.ptr, host.ctypes.data, host.nbytes, 4, stream.ptr)
    del host
    others = [np.full(count, 9, "f4") for _ in range(300 if count < COUNT else 6)]
    stream.synchronize()
    assert (cupy.asnumpy(target) == 3).all()
    del others


@pytest.mark.behaviour("G3")
@pytest.mark.parametrize("count", [3 * COUNT, COUNT // 4], ids=["grows", "shrinks"])
@pytest.mark.parametrize("kept", [False, True], ids=["the view is gone", "the view is there"])
def test_a_resized_array_has_what_the_kernel_writes(bridge, cupy, slow, streams, count, kept) -> None:
    """The block moves, and what is copied out of it is what it has once the kernel is done."""
    host = np.zeros(COUNT, "f4")
    address = host.ctypes.data
    stream = streams()
    with stream:
        view = bridge.as_cupy(host)
        slow.fill(view, 9)
        if not kept:
            del view
    host.resize(count, refcheck=False)
    assert host.ctypes.data != address
    left = min(count, COUNT)
    assert (host[:left] == 9).all() and not host[left:].any()
    assert bridge.allocation_of(host).resized_count == 1


def test_a_numpy_block_shown_to_warp_waits_for_warps_stream(bridge, warp, cupy, slow) -> None:
    host = np.zeros(COUNT, "f4")
    address = host.ctypes.data
    view = bridge.as_warp(host)
    stream = cupy.cuda.Stream.from_external(warp.get_stream("cuda:0"))
    with stream:
        memory = cupy.cuda.UnownedMemory(address, COUNT * 4, view)
        slow.fill(cupy.ndarray(COUNT, "f4", cupy.cuda.MemoryPointer(memory, 0)), 5)
    del host, view, memory
    gc.collect()
    arrays = [np.zeros(COUNT, "f4") for _ in range(5)]
    stream.synchronize()
    assert not any(array.any() for array in arrays)


@pytest.mark.behaviour("G1")
def test_another_stream_waits_on_the_device_not_on_the_cpu(bridge, cupy, slow, streams) -> None:
    a, b = streams(), streams()
    with a:
        x = cupy.zeros(COUNT, "f4")
        slow.fill(x, 1)
        del x  # goes to a's lane: a's kernel is still writing
    with b:
        y = cupy.full(COUNT, 2, "f4")
    a.synchronize()
    b.synchronize()
    assert (cupy.asnumpy(y) == 2).all()


def test_a_block_of_a_stream_that_is_gone_is_waited_for(bridge, cupy, slow, streams) -> None:
    host = np.zeros(COUNT, "f4")
    address = host.ctypes.data
    stream = streams()
    done = cupy.cuda.Event()
    with stream:
        device = bridge.as_cupy(host)
        slow.fill(device, 9)
        done.record()
    del stream, device, host
    gc.collect()
    arrays = [np.zeros(COUNT, "f4") for _ in range(5)]
    assert address not in [array.ctypes.data for array in arrays]
    done.synchronize()
    assert not any(array.any() for array in arrays)


def test_streams_made_for_each_request_do_not_pile_up(bridge, cupy, streams, rmm_pool) -> None:
    heap = rmm_pool.mr.get_current_device_resource().pool
    for _ in range(300):
        with streams():
            cupy.ones(1000, "f4")
    assert heap.numbers[4] < 50  # lanes


def test_patterns_survive_reuse_on_many_streams_and_threads(bridge, cupy, slow) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        with bridge.numpy_allocator():  # in context scope no other thread has the handler
            check(seed)

    def check(seed: int) -> None:
        random = np.random.default_rng(seed)
        cupy.cuda.Device(0).use()
        mine = [cupy.cuda.Stream(non_blocking=bool(i % 2)) for i in range(3)]
        for step in range(120):
            size = int(2 ** random.uniform(4, 20))
            value = float(seed * 1000 + step)
            with mine[step % 3] as stream:
                x = cupy.empty(size, "f4")
                slow.fill(x, value, clocks=200_000)
                if step % 2:
                    host = bridge.as_numpy(x)
                    if not (host == np.float32(value)).all():
                        failures.append(f"thread {seed} step {step}: device block changed")
                else:
                    host = np.full(size, value, "f4")
                    y = bridge.as_cupy(host)
                    del host
                    z = y + np.float32(1)
                    del y
                    if not (bridge.as_numpy(z) == np.float32(value) + 1).all():
                        failures.append(f"thread {seed} step {step}: host block changed")
                del stream

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
