"""The PyTorch adapter on a stub of PyTorch: what it sets, what it cannot undo, and the entry points: M2, P5, D1."""

import contextlib
import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import rmm
from helpers import stub_pools, stub_torch
from helpers.programs import must_succeed, run_python
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge.adapters import torch as adapter
from rmm_managed_bridge.config import PoolSettings
from rmm_managed_bridge.frameworks import torch as frameworks_torch
from rmm_managed_bridge.frameworks.registry import keeps_stream
from rmm_managed_bridge.frameworks.streams import stream_handle

MIB = 1 << 20
BOTH = ["torch", "numpy"]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the stub of PyTorch, which `install` can hook."""
    stub_pools.put_in_place(monkeypatch)
    return stub_torch.put_in_place(monkeypatch)


@contextlib.contextmanager
def installed(**arguments: Any) -> Any:
    """Install for PyTorch, and expect `uninstall` to say what it cannot undo."""
    bridge.install(frameworks=BOTH, **arguments)
    try:
        yield
    finally:
        with pytest.warns(bridge.BridgeWarning, match="PyTorch's allocator cannot be changed back"):
            bridge.uninstall()


def test_tensors_come_from_the_pool_and_are_recorded_as_torchs(torch: Any) -> None:
    before = bridge.stats().size_mismatches
    with installed():
        assert bridge.status().frameworks == {"numpy": "hooked", "torch": "hooked"}
        tensor = torch.empty(4 * MIB)
        record = bridge.allocation_of(tensor)
        assert record is not None
        assert (record.framework, record.requested_bytes, record.device) == ("torch", 4 * MIB, 0)
        # PyTorch lets go of the GIL before it allocates: the thread reads its own frames without it.
        assert (record.site.file, record.site.function) == (stub_torch.__file__, "Storage.__init__")
        del tensor
    assert bridge.stats().size_mismatches == before


def test_torch_is_never_hooked_unless_it_is_named(torch: Any) -> None:
    with bridge.installed():
        assert torch.current is None
        assert "cannot be changed back" in bridge.status().frameworks["torch"]


def test_after_first_use_it_is_one_clear_error_and_nothing_is_half_installed(torch: Any) -> None:
    torch.initialized = True
    with pytest.raises(bridge.FrameworkError, match=r"used CUDA memory before(.|\n)*torch_mempool"):
        bridge.install(frameworks=BOTH)
    assert not bridge.status().installed
    assert not bridge.owns(np.ones(10))
    assert bridge.stats().pools == ()


def test_it_is_hooked_last_since_it_cannot_be_undone(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise bridge.FrameworkError("not now")

    monkeypatch.setattr("rmm_managed_bridge.adapters.numpy.NumpyAdapter.hook", refuse)
    with pytest.raises(bridge.FrameworkError, match="not now"):
        bridge.install(frameworks=BOTH)
    assert torch.current is None


def test_installing_again_changes_the_pool_and_not_the_allocator(torch: Any) -> None:
    with installed():
        old = torch.empty(MIB)
    torch.initialized = True
    with installed():
        new = torch.empty(2 * MIB)
        pools = [(each.current, each.current_bytes) for each in bridge.stats().pools]
        assert pools == [(False, MIB), (True, 2 * MIB)]
    del old, new


def test_after_uninstall_tensors_go_on_coming_from_the_pool_that_its_resource_keeps(
    torch: Any, make_heap: Callable[..., Any]
) -> None:
    heap, resource = make_heap(device=0), object()
    hook = adapter.TorchAdapter({0: heap}, {0: resource})
    hook.hook()
    assert "go on coming from this pool" in str(hook.unhook())
    assert adapter._kept == {0: resource}
    tensor = torch.empty(MIB)
    assert heap.live_bytes == MIB
    del tensor
    assert heap.live_bytes == 0


@pytest.mark.behaviour("M2")
def test_out_of_memory_is_a_runtime_error_with_our_text(torch: Any) -> None:
    with installed(maximum_pool_size="64MiB"):
        kept = torch.empty(8 * MIB)
        failures = bridge.stats().failures
        with pytest.raises(
            RuntimeError, match=rf"no {128 * MIB} bytes for PyTorch on device 0: out of memory; {8 * MIB} b"
        ):
            torch.empty(128 * MIB)
        assert bridge.stats().failures == failures + 1
        assert bridge.stats().current_bytes == 8 * MIB
        assert bridge.owns(torch.empty(MIB))
        del kept


@pytest.mark.behaviour("M2")
def test_out_of_memory_of_a_memory_pool_is_torchs_own_class(torch: Any, make_heap: Callable[..., Any]) -> None:
    make_heap(device=0, settings=PoolSettings(limit_bytes=64 * MIB))
    pool = bridge.torch_mempool()
    assert pool is bridge.torch_mempool()
    with torch.use_mem_pool(pool):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(128 * MIB)
        tensor = torch.empty(MIB)
        record = bridge.allocation_of(tensor)
        assert record is not None
        assert record.framework == "torch"
        del tensor


def test_a_memory_pool_moves_to_the_pool_that_is_installed_later(torch: Any, make_heap: Callable[..., Any]) -> None:
    old = make_heap(device=0)
    torch.pool = bridge.torch_mempool()
    first = torch.empty(MIB)
    old.retire()
    with bridge.installed(frameworks=["numpy"]):
        second = torch.empty(2 * MIB)
        assert old.live_bytes == MIB
        assert bridge.stats().by("framework")["torch"].current_bytes == 3 * MIB
        del first, second
    assert eventually(lambda: old.closed)


def test_a_closed_pool_says_what_to_do(torch: Any, make_heap: Callable[..., Any]) -> None:
    heap = make_heap(device=0)
    torch.current = object()
    adapter._the_entry().use(0, heap)
    heap.retire()
    assert heap.closed
    with pytest.raises(RuntimeError, match=r"closed by uninstall(.|\n)*call rmm_managed_bridge\.install\(\) again"):
        torch.empty(MIB)


def test_where_no_pool_serves_the_error_says_what_to_do(torch: Any) -> None:
    with pytest.raises(bridge.InstallError, match=r"call install\(\) first"):
        bridge.torch_mempool()
    torch.current = object()
    for device in (5, -1, 1000):
        with pytest.raises(RuntimeError, match=rf"on device {device}: no pool of the bridge serves(.|\n)*devices="):
            torch.empty(MIB, device)
        assert torch.empty(0, device).ptr == 0


def test_no_device_and_no_torch_are_named_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_torch.put_in_place(monkeypatch, devices=0)
    with pytest.raises(bridge.FrameworkError, match="there is no device here"):
        bridge.install("host", frameworks=["torch"])
    with pytest.raises(bridge.FrameworkError, match="no CUDA device"):
        bridge.torch_mempool()
    monkeypatch.setitem(sys.modules, "torch", None)
    for call in (lambda: bridge.install("host", frameworks=["torch"]), bridge.torch_mempool):
        with pytest.raises(bridge.FrameworkError, match="torch cannot be imported"):
            call()
    assert not bridge.status().installed


@pytest.mark.behaviour("P5")
def test_what_is_seen_to_come_is_seen_to_go(torch: Any) -> None:
    with installed():
        before = bridge.stats()
        for _ in range(1000):
            torch.empty(4096)

        def fail_at_once() -> None:
            _kept = torch.empty(4096)
            raise KeyError

        for _ in range(100):
            with contextlib.suppress(KeyError):
                fail_at_once()
        after = bridge.stats()
        assert after.by("framework")["torch"].total_count - _total(before, "torch") == 1100
        assert after.current_count == before.current_count
        assert (after.foreign_frees, after.size_mismatches) == (before.foreign_frees, before.size_mismatches)


def _total(stats: Any, framework: str) -> int:
    usage = stats.by("framework").get(framework)
    return 0 if usage is None else usage.total_count


@pytest.mark.behaviour("D1")
def test_each_device_has_its_pool_and_frees_find_their_way(torch: Any, make_heap: Callable[..., Any]) -> None:
    heaps = {number: make_heap(device=number) for number in (0, 1)}
    torch.current = object()
    adapter._the_entry()
    adapter.serve(heaps)
    tensor = torch.empty(MIB, device=1)
    record = bridge.allocation_of(tensor)
    assert record is not None
    assert record.device == 1
    assert [heap.live_bytes for heap in heaps.values()] == [0, MIB]
    tensor._state = (MIB, 0, 0)  # what is stated does not matter: the address does
    del tensor
    assert [heap.live_bytes for heap in heaps.values()] == [0, 0]


@pytest.mark.behaviour("S1")
def test_a_size_that_is_not_the_recorded_one_is_reported(torch: Any, make_heap: Callable[..., Any]) -> None:
    guest = adapter._the_entry()
    guest.use(0, make_heap(device=0))
    before = bridge.stats().size_mismatches
    guest.free(guest.malloc(4096, 0, 0), 512, 0, 0)
    assert bridge.stats().size_mismatches == before + 1
    guest.free(0x1234_5678_9000, 512, 0, 0)
    assert bridge.history().events[-1].action == "foreign_free"


@pytest.mark.requires("no_gpu")
def test_torch_moves_to_the_new_pool_when_rmm_is_reinitialised(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmm.rmm, "_initialize", lambda **_: None)
    with installed():
        old = torch.empty(MIB)
        with pytest.warns(bridge.BridgeWarning, match="of torch"):
            rmm.reinitialize()
        new = torch.empty(2 * MIB)
        pools = [(each.current, each.current_bytes) for each in bridge.stats().pools]
        assert pools == [(False, MIB), (True, 2 * MIB)]
        del old, new


def test_streams_of_torchs_own_are_held_and_others_are_not(
    torch: Any, make_heap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heap = make_heap(device=1)
    held: list[int] = []
    monkeypatch.setattr(
        adapter.native_pool, "pools", lambda: [_Recorder(heap, held), _Recorder(make_heap(device=0), held)]
    )
    own = frameworks_torch.own_streams(1)
    assert sorted(own) == [*range(1900, 1904), *range(2000, 2004)]
    adapter._hold_stream(2001, 1)
    adapter._hold_stream(1903, 1)
    adapter._hold_stream(4711, 1)  # an ExternalStream: its life is not PyTorch's
    assert held == [2001, 1903]


def test_a_stream_whose_id_is_its_handle_came_from_outside() -> None:
    kind = type("Stream", (), {"__module__": "torch.cuda.streams"})
    for stream_id, handle, expected in ((35, 0x5000, True), (0x5000, 0x5000, False)):
        stream = kind()
        stream.stream_id, stream.cuda_stream = stream_id, handle
        assert keeps_stream(stream) is expected
        assert stream_handle(stream) == handle


@pytest.mark.parametrize(
    ("root", "kind", "attributes", "expected"),
    [
        ("cupy", "Stream", {}, True),
        ("cupy", "ExternalStream", {}, False),
        ("warp", "Stream", {"owner": True}, True),
        ("warp", "Stream", {"owner": False}, False),
        ("numba", "Stream", {"external": False}, True),
        ("numba", "Stream", {"external": True}, False),
        ("cuda", "Stream", {}, False),  # cuda.core: it may wrap a handle, and can be closed
        ("somebody", "Stream", {}, False),
    ],
)
def test_only_what_is_known_to_keep_its_stream_alive_counts_as_its_owner(
    root: str, kind: str, attributes: dict[str, bool], expected: bool
) -> None:
    """The handle of one that does not could come back as another stream's while the object is held."""
    stream = type(kind, (), {"__module__": f"{root}.streams", **attributes})()
    assert keeps_stream(stream) is expected


def test_a_stream_of_rmms_is_as_good_as_what_it_wraps() -> None:
    from rmm.pylibrmm.stream import DEFAULT_STREAM, Stream

    wrapped = {
        kind: Stream(type(kind, (), {"__module__": "cupy.cuda.stream", "__cuda_stream__": lambda self: (0, 0x5000)})())
        for kind in ("Stream", "ExternalStream")
    }
    assert [keeps_stream(stream) for stream in wrapped.values()] == [True, False]
    assert not keeps_stream(DEFAULT_STREAM)
    assert not keeps_stream(0x5000)


class _Recorder:
    def __init__(self, heap: Any, held: list[int]) -> None:
        self.device, self._held = heap.device, held

    def hold(self, handle: int, stream: Any) -> None:
        assert stream.cuda_stream == handle
        if self.device == 1:
            self._held.append(handle)


def pool_array(heap: Any, shape: tuple[int, ...], dtype: str = "f4") -> Any:
    """Return an array over a block of the heap, which is freed with it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    ptr = heap.allocate(size)
    buffer = (ctypes.c_char * size).from_address(ptr)
    weakref.finalize(buffer, heap.deallocate, ptr)
    return np.frombuffer(buffer, dtype).reshape(shape)


def test_views_keep_place_and_source(torch: Any, make_heap: Callable[..., Any]) -> None:
    heap = make_heap(device=0, kind="managed")
    array = pool_array(heap, (4, 6))
    view = bridge.as_torch(array)
    assert (view.data_ptr(), view.shape, view.device) == (array.ctypes.data, (4, 6), "cuda:0")
    assert view.source.__cuda_array_interface__["typestr"] == "<f4"
    turned = bridge.as_torch(array.T)
    assert turned.source.__cuda_array_interface__["strides"] == (4, 24)
    assert bridge.as_torch(view) is view
    del array, turned
    gc.collect()
    assert heap.live_count == 1, "the view keeps it"
    del view
    gc.collect()
    assert heap.live_count == 0
    assert bridge.as_torch(np.empty((3, 0))).shape == (3, 0)


def test_host_memory_gives_tensors_on_the_cpu(torch: Any, host_heap: Any) -> None:
    array = pool_array(host_heap, (10,))
    view = bridge.as_torch(array)
    assert (view.data_ptr(), view.device) == (array.ctypes.data, "cpu")
    del array, view
    gc.collect()


def test_what_torch_cannot_express_is_refused(torch: Any, make_heap: Callable[..., Any]) -> None:
    array = pool_array(make_heap(device=0, kind="managed"), (4, 6))
    readonly = array[:]
    readonly.flags.writeable = False
    for wrong, reason in (
        (array[::-1], "negative strides"),
        (array.view("u1")[:, 1:].view("V1"), "no type for dtype"),
        (array.view(">f4"), "byte-swapped"),
        (readonly, "read-only"),
        (np.array([None]), "Python objects"),
        (np.ones(3), "does not lie in a live block"),
    ):
        with pytest.raises(bridge.ViewError, match=reason):
            bridge.as_torch(wrong)
    torch.copies = True
    with pytest.raises(bridge.ViewError, match="made a copy"):
        bridge.as_torch(array)
    del array, readonly, wrong
    gc.collect()


@pytest.mark.behaviour("L8")
@pytest.mark.behaviour("L1")
def test_a_forked_child_is_refused_and_an_exit_with_live_blocks_is_silent() -> None:
    program = """
        import os
        from rmm_managed_bridge._native import pool as native_pool, torch_entry

        heap = native_pool.host_pool(device=0)
        guest = torch_entry.TorchEntry(lambda handle, device: None)
        guest.use(0, heap)

        class Tensor:
            def __init__(self):
                self.free, self.ptr = guest.free, guest.malloc(4096, 0, 0)
            def __del__(self):
                self.free(self.ptr, 4096, 0, 0)

        kept = [Tensor() for _ in range(10)]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                guest.malloc(4096, 0, 0)
            except RuntimeError as error:
                code = 0 if "forked" in str(error) else 2
            kept.pop()
            guest.record_stream(kept[0].ptr, 0)
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert heap.live_count == 10
        print("done")
    """
    assert must_succeed(run_python(program)) == "done\n"


def test_record_stream_is_given_to_torch(torch: Any) -> None:
    with installed():
        assert torch.current.record_stream_address == adapter._the_entry().record_stream_address != 0
