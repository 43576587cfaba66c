"""What CuPy's and Warp's malloc do when memory is short, on stubs of both: M2, M3; and that nothing is lost: P5."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import c_caller, stub_cupy, stub_pools, stub_torch, stub_warp
from helpers.programs import recorded_events

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import cupy_entry, numpy_handler, pressure
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.config import PoolSettings

MIB = 1 << 20
no_compiler = pytest.mark.skipif(c_caller.why_not() is not None, reason=c_caller.why_not() or "")


@pytest.fixture(params=["cupy", "warp"])
def name(request: pytest.FixtureRequest) -> Any:
    """Name the framework."""
    return request.param


@pytest.fixture
def framework(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the stub of the framework, which `install` can hook."""
    stub_pools.put_in_place(monkeypatch)
    if name == "cupy":
        return stub_cupy.put_in_place(monkeypatch)
    monkeypatch.setattr(native_process, "current_device", lambda: 0)
    return stub_warp.put_in_place(monkeypatch, 1)


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the garbage be collected under pressure only, and return what grows by one each time it is."""
    found: list[str] = []

    def collect() -> None:
        found.append("collect")
        gc.collect()

    monkeypatch.setattr(pressure, "collect_garbage", collect)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


@pytest.fixture
def small_pool(name: str, framework: Any) -> Iterator[bridge.Bridge]:
    """The bridge with a pool of at most 64 MiB."""
    with bridge.installed(frameworks=["numpy", name], maximum_pool_size="64MiB") as installed:
        yield installed


class Cycle:
    """Garbage that holds a block, and whose end is Python code that meets an exception."""

    def __init__(self, block: Any) -> None:
        self.block, self.me = block, self

    def __del__(self) -> None:
        try:
            raise ValueError
        except ValueError:
            del self.block


@pytest.mark.behaviour("M2")
@pytest.mark.behaviour("M3")
def test_a_hopeless_request_collects_once_and_is_the_frameworks_own_error(
    name: str, framework: Any, small_pool: Any, collections: list[str]
) -> None:
    wanted = stub_cupy.OutOfMemoryError if name == "cupy" else MemoryError
    with bridge.tag("big"):
        kept = framework.alloc(8 * MIB)
    assert collections == [], "there was no need"
    before = bridge.stats()
    with pytest.raises(wanted) as raised:
        framework.alloc(128 * MIB)
    assert type(raised.value) is wanted
    text = str(raised.value)
    assert text.startswith("cannot allocate 128 MiB: 8.00 MiB live")
    assert '"big"' in text
    assert collections == ["collect"]
    after = bridge.stats()
    assert (after.current_bytes, after.current_count) == (before.current_bytes, before.current_count)
    assert after.failures == before.failures + 1, "one request failed, however often it was tried"
    assert bridge.owns(framework.alloc(MIB).ptr)
    del kept


@pytest.mark.behaviour("M3")
def test_garbage_makes_room(framework: Any, small_pool: Any, collections: list[str]) -> None:
    Cycle(framework.alloc(40 * MIB))
    block = framework.alloc(40 * MIB)
    assert bridge.owns(block.ptr)
    assert collections == ["collect"]
    del block


@pytest.mark.behaviour("M3")
def test_the_callback_comes_after_the_garbage_and_counts_its_own_attempts(
    name: str, framework: Any, collections: list[str]
) -> None:
    kept: list[Any] = []
    asked: list[tuple[int, int, int]] = []

    def make_room(size_bytes: int, attempt: int) -> bool:
        asked.append((size_bytes, attempt, len(collections)))
        if attempt == 2:
            kept.clear()
        return attempt < 3

    with bridge.installed(frameworks=["numpy", name], maximum_pool_size="64MiB", on_oom=make_room):
        kept.append(framework.alloc(40 * MIB))
        block = framework.alloc(40 * MIB)
        assert bridge.owns(block.ptr)
        assert asked == [(40 * MIB, 1, 1), (40 * MIB, 2, 1)]
        assert collections == ["collect"]
        del block


@no_compiler
@pytest.mark.behaviour("M3")
def test_an_exception_that_is_on_its_way_outlives_the_collection(
    make_heap: Callable[..., Any], collections: list[str], tmp_path: Path
) -> None:
    """In CuPy's malloc, which is C. Warp's is a Python method, and nobody calls one so."""

    class Block:
        def __init__(self, heap: Any) -> None:
            self.heap, self.ptr = heap, heap.allocate(40 * MIB)

        def __del__(self) -> None:
            self.heap.deallocate(self.ptr)

    heap = make_heap(device=0, settings=PoolSettings(limit_bytes=64 * MIB))
    guest = cupy_entry.CupyEntry(*[lambda *arguments: pytest.fail(f"called with {arguments}")] * 3)
    assert guest.use_stream_function(c_caller.stream_function(tmp_path, b"intptr_t (void)"))
    guest.use(0, heap)
    context, malloc, _ = guest.addresses
    Cycle(Block(heap))
    ptr, pending = c_caller.allocate_with_error_set(tmp_path, malloc, context, 40 * MIB, device=0)
    assert collections == ["collect"]
    assert native_pool.pool_containing(ptr) is heap
    assert (type(pending), str(pending)) == (KeyError, "'on its way'")
    guest.free(ptr, 0)


@no_compiler
@pytest.mark.behaviour("M3")
def test_an_exception_that_is_on_its_way_outlives_the_callback_in_numpys_functions(tmp_path: Path) -> None:
    asked: list[int] = []

    def make_room(size_bytes: int, attempt: int) -> bool:
        asked.append(size_bytes)
        try:
            raise ValueError
        except ValueError:
            return False

    with bridge.installed("host", frameworks=["numpy"], maximum_pool_size="64MiB", on_oom=make_room):
        functions = c_caller.functions_of(numpy_handler.default_handler().capsule)
        ptr, pending = c_caller.allocate_with_error_set(tmp_path, functions.malloc, functions.context, 128 * MIB)
        assert (ptr, asked) == (0, [128 * MIB])
        assert (type(pending), str(pending)) == (KeyError, "'on its way'")
        numpy_handler.take_refusal()


@pytest.mark.behaviour("M3")
def test_no_python_runs_in_pytorchs_malloc(monkeypatch: pytest.MonkeyPatch, collections: list[str]) -> None:
    """PyTorch calls it without the GIL: docs/guide/limits.md says why it is not taken."""
    stub_pools.put_in_place(monkeypatch)
    torch = stub_torch.put_in_place(monkeypatch)
    asked: list[int] = []

    def make_room(size_bytes: int, attempt: int) -> bool:
        asked.append(size_bytes)
        return True

    bridge.install(frameworks=["numpy", "torch"], maximum_pool_size="64MiB", on_oom=make_room)
    try:
        Cycle(torch.empty(40 * MIB))
        with pytest.raises(RuntimeError, match="out of memory"):
            torch.empty(40 * MIB)
        assert (collections, asked) == ([], [])
        gc.collect()
        assert bridge.owns(torch.empty(40 * MIB)), "what was advised: collect, and try again"
    finally:
        with pytest.warns(bridge.BridgeWarning, match="cannot be changed back"):
            bridge.uninstall()


class _OopsError(Exception):
    pass


@pytest.mark.behaviour("P5")
def test_every_allocation_is_seen_to_go(name: str, framework: Any) -> None:
    def fail(allocate: Callable[[int], Any]) -> None:
        _kept = allocate(4096)
        raise _OopsError

    with bridge.installed(frameworks=["numpy", name]):
        before = bridge.stats()
        with recorded_events(10_000):
            for _ in range(1_000):
                framework.alloc(4096)
            for _ in range(100):
                with pytest.raises(_OopsError):
                    fail(framework.alloc)
            gc.collect()
            events = bridge.history().events
        after = bridge.stats()
    allocated = [event.serial for event in events if event.action == "allocate"]
    freed = [event.serial for event in events if event.action == "deallocate"]
    assert {(event.framework, event.requested_bytes) for event in events} == {(name, 4096)}
    assert len(allocated) == 1_100
    assert sorted(freed) == allocated
    assert after.current_count == before.current_count
    assert (after.foreign_frees, after.size_mismatches) == (before.foreign_frees, before.size_mismatches)
