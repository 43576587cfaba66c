"""Hints and the real driver: A1, A2, advice that ends with its block, captures, discard, policies."""

import importlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.programs import run_on_gpu

from rmm_managed_bridge._native import hint_table
from rmm_managed_bridge.hints import driver

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]
MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
MODES = {"global": 0, "thread-local": 1, "relaxed": 2}  # cudaStreamCaptureMode
NOTHING = driver.Attributes(
    last_prefetch=hint_table.NOWHERE, read_mostly=False, preferred=hint_table.NOWHERE, accessed_by=()
)


@pytest.fixture(params=["cuda.bindings", "cuda.core"])
def room(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Each way of calling the driver in turn: `cuda.core` may be too old here, or missing."""
    bindings = importlib.import_module("cuda.bindings.driver")
    if request.param == "cuda.core":
        core = pytest.importorskip("cuda.core")
        if not hasattr(core, "ManagedBuffer"):
            pytest.skip(f"cuda-core {core.__version__} has no ManagedBuffer; it came with 1.1")
        made: driver.HintDriver = driver.CudaCore(bindings, core)
    else:
        made = driver.CudaBindings(bindings)
    monkeypatch.setattr(driver, "load", lambda: made)
    yield made


def attributes(room: Any, ptr: int, pages: tuple[int, int]) -> driver.Attributes:
    """Ask the driver about pages, whoever has them now; `ptr` is any address of the pool."""
    with hint_table.driver_scope(ptr):
        return room.attributes(pages)


@pytest.mark.behaviour("A1")
def test_a_prefetch_is_given_and_read_back(bridge, cupy, streams, room) -> None:
    array = np.arange(MIB, dtype="f8")
    for stream in (None, streams(), cupy.cuda.Stream.null, cupy.cuda.Stream.ptds):
        for to, name in ((0, "cuda:0"), ("cpu", "cpu")):
            result = bridge.prefetch(array, to, stream)
            assert result, str(result)
            assert result.size_bytes >= array.nbytes
            found = bridge.residency(array)
            assert (found.asked, found.last_prefetch) == (name, name)
    cupy.cuda.runtime.deviceSynchronize()
    assert (array == np.arange(MIB)).all()


@pytest.mark.behaviour("A1")
def test_a_prefetch_of_a_slice_is_of_its_pages(bridge, room) -> None:
    array = np.ones(MIB)
    assert bridge.prefetch(array, "cpu")
    piece = array[1000:2000]
    result = bridge.prefetch(piece, 0)
    assert (result.ptr, result.ptr + result.size_bytes) == (
        piece.ctypes.data // PAGE * PAGE,
        -(-(piece.ctypes.data + piece.nbytes) // PAGE) * PAGE,
    )
    assert bridge.residency(piece).last_prefetch == "cuda:0"
    assert bridge.residency(array).last_prefetch is None
    assert bridge.residency(array[4000:]).last_prefetch == "cpu"
    assert bridge.prefetch(array[::-3], 0) and bridge.residency(array[:-3]).last_prefetch == "cuda:0"


@pytest.mark.behaviour("A1")
def test_all_six_forms_of_advice(bridge, room) -> None:
    array = np.ones(MIB)
    assert bridge.advise(array, read_mostly=True)
    assert bridge.residency(array).read_mostly
    assert bridge.advise(array, read_mostly=False)
    assert not bridge.residency(array).read_mostly
    for place, name in (("cpu", "cpu"), (0, "cuda:0")):
        assert bridge.advise(array, preferred_location=place)
        assert bridge.residency(array).preferred_location == name
    assert bridge.advise(array, preferred_location=None)
    assert bridge.residency(array).preferred_location is None
    assert bridge.advise(array, accessed_by=0)
    assert bridge.residency(array).accessed_by == ("cuda:0",)
    assert bridge.advise(array, accessed_by=None)
    assert bridge.residency(array).accessed_by == ()
    assert (array == 1).all()


def test_a_list_of_arrays_of_all_frameworks(bridge, cupy, warp, streams, room) -> None:
    arrays = [np.ones(MIB), cupy.ones(MIB), warp.ones(MIB, dtype=warp.float32, device="cuda:0")]
    stream = streams()
    for to, name in (("cpu", "cpu"), (cupy.cuda.Device(0), "cuda:0"), (warp.get_device("cpu"), "cpu")):
        for given in (None, stream):
            result = bridge.prefetch(arrays, to, given)
            assert result and len(result.parts) == 3, str(result)
            assert [bridge.residency(array).last_prefetch for array in arrays] == [name] * 3
    cupy.cuda.runtime.deviceSynchronize()
    assert float(arrays[1].sum()) == MIB


@pytest.mark.behaviour("A2")
def test_where_no_hint_can_be_given_it_is_skipped_with_a_reason(bridge, rmm_pool, cupy, room) -> None:
    resource = bridge.ManagedBridgeResource(rmm_pool.mr.CudaMemoryResource(), maximum_pool_size="256MiB")
    device_only = rmm_pool.DeviceBuffer(size=MIB, mr=resource)
    with bridge.numpy_allocator("host"):
        host = np.ones(MIB)
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        foreign = cupy.ones(MIB, "u1")
    skip = bridge.HintSkip
    before = dict(bridge.stats().hints_skipped)
    for x, reason in (
        (device_only, skip.NOT_MANAGED),
        (host, skip.HOST),
        (foreign, skip.FOREIGN),
        (cupy.empty(0), skip.EMPTY),
    ):
        for result in (bridge.prefetch(x, 0), bridge.advise(x, read_mostly=True), bridge.discard(x)):
            assert not result and result.reason == reason
        assert bridge.stats().hints_skipped[reason] == before.get(reason, 0) + 3
    del device_only, host, foreign


@pytest.mark.parametrize("maker", ["numpy", "cupy"])
@pytest.mark.parametrize("size_bytes", [1 << 16, 8 * MIB])
def test_the_next_owner_of_pages_inherits_no_advice(bridge, cupy, room, maker, size_bytes) -> None:
    def make() -> Any:
        return np.empty(size_bytes, "u1") if maker == "numpy" else cupy.empty(size_bytes, "u1")

    kept, array = make(), make()
    result = bridge.advise(array, read_mostly=True, preferred_location="cpu", accessed_by=0)
    assert result, str(result)
    pages, ptr = (result.ptr, result.ptr + result.size_bytes), bridge.allocation_of(kept).ptr
    found = attributes(room, ptr, pages)
    assert (found.read_mostly, found.preferred, found.accessed_by) == (True, hint_table.CPU, (0,))
    del array
    assert attributes(room, ptr, pages)._replace(last_prefetch=hint_table.NOWHERE) == NOTHING
    assert bridge.residency(make()).accessed_by == ()


def test_a_free_that_ends_advice_waits_for_no_kernel(bridge, cupy, slow, streams, room) -> None:
    array = np.ones(2 * MIB, "f4")
    bridge.advise(array, read_mostly=True, preferred_location="cpu", accessed_by=0)
    bridge.prefetch(array, 0)
    target = cupy.zeros(2 * MIB, "f4")
    cupy.cuda.runtime.deviceSynchronize()
    with streams() as stream:
        there = bridge.as_cupy(array)
        slow.copy(there, target)
        event = stream.record()
        del there, array
        assert not event.done, "the free waited for the kernel"
        stream.synchronize()
    assert (bridge.as_numpy(target) == 1).all()


def test_discard_loses_nothing_but_its_own_pages(bridge, cupy, slow, room) -> None:
    whole = np.arange(3 * MIB, dtype="f4")
    first, last = MIB // 2 + 5, 2 * MIB + 77
    result = bridge.discard(whole[first:last])
    assert result, str(result)
    low = (result.ptr - whole.ctypes.data) // 4
    high = low + result.size_bytes // 4
    assert first <= low < high <= last
    expected = np.arange(3 * MIB, dtype="f4")
    assert (whole[:low] == expected[:low]).all() and (whole[high:] == expected[high:]).all()
    whole[low:high] = 7
    assert (whole[low:high] == 7).all()

    on_device = cupy.zeros(4 * MIB, "f4")
    slow.fill(on_device, 3.0)
    assert bridge.discard(on_device)
    on_device[:] = 5  # on the same stream, so after the contents are gone
    assert float(on_device.sum()) == 5 * 4 * MIB


def test_the_next_owner_of_a_discarded_block_keeps_its_bytes(bridge, cupy, slow, streams, room) -> None:
    """The discard waits for a slow kernel; who gets the memory meanwhile would lose what it writes."""
    with streams():
        array = cupy.zeros(2 * MIB, "f4")
        slow.fill(array, 3.0)
        assert bridge.discard(array)
        del array
    fresh = [np.full(2 * MIB, number, "f4") for number in range(5)]
    other = cupy.full(2 * MIB, 9, "f4")
    cupy.cuda.runtime.deviceSynchronize()
    assert all((each == number).all() for number, each in enumerate(fresh))
    assert float(other.sum()) == 9 * 2 * MIB


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocking", [False, True], ids=["non-blocking", "blocking"])
@pytest.mark.parametrize("where", ["same thread", "another thread"])
def test_hints_leave_a_capture_alone(bridge, cupy, streams, room, mode, blocking, where) -> None:
    captured, other = cupy.cuda.Stream(non_blocking=not blocking), streams()
    with captured:
        a = cupy.zeros(1000, "f4")
    with other:
        used = cupy.zeros(MIB, "f4")
    array, advised, shown = np.ones(MIB, "f8"), np.ones(MIB, "f8"), np.ones(MIB, "f8")
    bridge.advise(advised, read_mostly=True, preferred_location="cpu", accessed_by=0)
    captured.synchronize()
    other.synchronize()
    problems: list[BaseException] = []

    def everything() -> None:
        nonlocal advised
        try:
            cupy.cuda.Device(0).use()
            capturing = bridge.HintSkip.CAPTURING
            assert bridge.prefetch(array, 0, captured).reason == capturing
            assert bridge.prefetch(array, "cpu", captured).reason == capturing
            assert bridge.prefetch(array, 0, other)
            assert bridge.prefetch(array, 0, cupy.cuda.Stream.null).reason == (capturing if blocking else None)
            assert bridge.advise(array, read_mostly=True, preferred_location=0, accessed_by=0)
            bridge.residency(array)
            bridge.discard(array)
            bridge.discard(used)
            advised = None  # its advice is undone
            with bridge.using_hints("device"), other:
                there = bridge.as_cupy(shown)
                fresh = cupy.empty(2 * MIB, "u1")
                bridge.as_numpy(there)
                del there, fresh
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


def test_hints_device_moves_both_ways_and_changes_nothing(bridge, cupy, warp, room) -> None:
    array = np.arange(2 * MIB, dtype="f4")
    with bridge.using_hints("device"):
        there = bridge.as_cupy(array)
        assert bridge.residency(array).last_prefetch == "cuda:0"
        there += 1
        assert bridge.as_numpy(there)[7] == 8
        assert bridge.residency(array).last_prefetch == "cpu"
        bridge.as_warp(array)
        assert bridge.residency(array).last_prefetch == "cuda:0"
        bridge.as_numpy(array)
        assert bridge.residency(array).last_prefetch == "cpu"
        fresh = cupy.empty(2 * MIB, "f4")
        made = warp.empty(2 * MIB, dtype=warp.float32, device="cuda:0")
        assert bridge.residency(fresh).last_prefetch == bridge.residency(made).last_prefetch == "cuda:0"
        small = np.ones(1000)
        bridge.as_cupy(small)
        assert bridge.residency(small).asked is None
    assert (array == np.arange(2 * MIB) + 1).all()


def test_hints_device_prefetches_buffers_of_rmm(rmm_pool, cupy, streams) -> None:
    import rmm_managed_bridge as bridge

    with bridge.installed("managed", frameworks=[], hints="device") as installed:
        before = bridge.stats()
        stream = rmm_pool.pylibrmm.stream.Stream(obj=streams())
        buffers = [rmm_pool.DeviceBuffer(size=8 * MIB, stream=stream), rmm_pool.DeviceBuffer(size=8 * MIB)]
        buffers.append(rmm_pool.DeviceBuffer.to_device(bytes(range(256)) * (MIB // 64), stream=stream))
        for buffer in buffers:
            found = bridge.residency(buffer)
            assert (found.asked, found.last_prefetch) == ("cuda:0", "cuda:0")
        small = rmm_pool.DeviceBuffer(size=1000, stream=stream)
        assert bridge.residency(small).asked is None
        ptr = installed.resources[0].allocate(8 * MIB, stream)
        assert bridge.residency(ptr).last_prefetch == "cuda:0"
        installed.resources[0].deallocate(ptr, 8 * MIB, stream)
        after = bridge.stats()
        assert after.hints_done["prefetch"] - before.hints_done.get("prefetch", 0) == 4
        assert after.hints_skipped == before.hints_skipped
        stream.synchronize()  # RMM copies on the legacy stream, which does not wait for this one
        assert buffers[2].tobytes() == bytes(range(256)) * (MIB // 64), "contents stay"
        del buffers, buffer, small
    cupy.cuda.runtime.deviceSynchronize()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocking", [False, True], ids=["non-blocking", "blocking"])
def test_prefetches_of_new_blocks_leave_a_capture_alone(rmm_pool, cupy, streams, mode, blocking) -> None:
    import rmm_managed_bridge as bridge

    captured, other = cupy.cuda.Stream(non_blocking=not blocking), streams()
    with cupy.cuda.using_allocator(None), captured:
        array = cupy.zeros(1000, "f4")
    captured.synchronize()
    on_captured, on_other = (rmm_pool.pylibrmm.stream.Stream(obj=each) for each in (captured, other))
    buffers: list[Any] = []
    with bridge.installed("managed", frameworks=[], hints="device"):
        before = bridge.stats()
        with captured:
            captured.begin_capture(MODES[mode])
            cupy.add(array, 1, out=array)
        try:
            with pytest.raises(RuntimeError, match="being captured"):
                rmm_pool.DeviceBuffer(size=8 * MIB, stream=on_captured)
            buffers.append(rmm_pool.DeviceBuffer(size=8 * MIB, stream=on_other))
            buffers.append(rmm_pool.DeviceBuffer(size=8 * MIB))  # on the legacy stream
        finally:
            with captured:
                graph = captured.end_capture()
        graph.launch(captured)
        captured.synchronize()
        assert float(array.sum()) == 1000
        assert [bridge.residency(each).asked for each in buffers] == ["cuda:0", None if blocking else "cuda:0"]
        capturing, after = bridge.HintSkip.CAPTURING, bridge.stats()
        assert after.hints_skipped.get(capturing, 0) - before.hints_skipped.get(capturing, 0) == int(blocking)
        assert after.hints_skipped.get("the driver refused", 0) == before.hints_skipped.get("the driver refused", 0)
        del buffers[:]
    cupy.cuda.runtime.deviceSynchronize()


_TORCH = """
import torch, rmm, numpy as np
import rmm_managed_bridge as bridge
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="256MiB", maximum_pool_size="1GiB")
"""


@pytest.mark.requires("torch")
def test_hints_device_prefetches_segments_of_a_pool_of_pytorch() -> None:
    """A process of its own, since PyTorch keeps such a pool for ever."""
    run_on_gpu(
        _TORCH
        + """
bridge.install(frameworks=["numpy"], hints="device")
side = torch.cuda.Stream()
with torch.cuda.use_mem_pool(bridge.torch_mempool()):
    plain = torch.full((4 << 20,), 3.0, device="cuda")
    with torch.cuda.stream(side):
        on_side = torch.full((4 << 20,), 5.0, device="cuda")
torch.cuda.synchronize()
for tensor in (plain, on_side):
    found = bridge.residency(tensor)
    assert (found.asked, found.last_prefetch) == ("cuda:0", "cuda:0"), found
assert bridge.stats().hints_done == {"prefetch": 2}, bridge.stats().hints_done
assert bridge.stats().hints_skipped == {}, bridge.stats().hints_skipped
assert plain.sum().item() == 3 * (4 << 20) and on_side.sum().item() == 5 * (4 << 20)
del plain, on_side, tensor
torch.cuda.empty_cache()
"""
    )


@pytest.mark.requires("torch")
def test_hints_device_prefetches_tensors_of_pytorch_on_any_thread() -> None:
    run_on_gpu(
        _TORCH
        + """
import threading
bridge.install(frameworks=["numpy", "torch"], hints="device")
made = []
def make():
    with torch.cuda.stream(torch.cuda.Stream()):
        made.append(torch.full((4 << 20,), 7.0, device="cuda"))
thread = threading.Thread(target=make)
thread.start()
make()
thread.join()
small = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()
for tensor in made:
    found = bridge.residency(tensor)
    assert (found.asked, found.last_prefetch) == ("cuda:0", "cuda:0"), found
    assert (bridge.as_numpy(tensor) == 7).all()
assert bridge.residency(small).asked is None
assert bridge.stats().hints_done["prefetch"] >= 2 and bridge.stats().hints_skipped == {}, bridge.stats()
bridge.uninstall()
after = torch.zeros(4 << 20, device="cuda")
assert bridge.owns(after) and bridge.residency(after).asked is None, "what install said ends with uninstall"
"""
    )


def test_hints_host_keep_the_pages_at_home(bridge, cupy, room) -> None:
    array = np.ones(2 * MIB, "f4")
    with bridge.using_hints(bridge.Hints.host):
        there = bridge.as_cupy(array)
    found = bridge.residency(array)
    assert (found.preferred_location, found.accessed_by, found.last_prefetch) == ("cpu", ("cuda:0",), None)
    there *= 3
    assert (bridge.as_numpy(there) == 3).all()


def test_hints_of_a_tag_follow_the_memory(bridge, cupy, room) -> None:
    with bridge.tag("table of hints", hints="read_mostly"):
        table = np.arange(2 * MIB, dtype="f4")
    there = bridge.as_cupy(table)
    assert bridge.residency(table).read_mostly and bridge.residency(table).last_prefetch == "cuda:0"
    assert float(there[1000]) == table[1000] == 1000
    there[1000] = 5
    assert bridge.as_numpy(there)[1000] == 5


def test_a_thread_without_a_context_may_give_hints(bridge, streams, room) -> None:
    array, stream = np.ones(MIB), streams()
    results: list[Any] = []

    def without_a_context() -> None:
        results.append(bridge.prefetch(array, 0, stream))
        results.append(bridge.advise(array, read_mostly=True))
        results.append(bridge.discard(array))

    thread = threading.Thread(target=without_a_context)
    thread.start()
    thread.join()
    assert all(results), [str(each) for each in results]
