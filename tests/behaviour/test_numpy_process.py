"""NumPy's own handler taken over: every thread, arrays of before and after, others' handlers: N1, N3, N5, N6."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import c_caller
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge._native import pool as native_pool

MIB = 1 << 20
get_handler_name: Callable[..., str] = np._core.multiarray.get_handler_name  # type: ignore[attr-defined]
SIZES = (1, 8, 1023, 1024, 1025, 5000, MIB, 5 * MIB)


@pytest.fixture
def process_scope() -> Iterator[bridge.Bridge]:
    with bridge.installed("host", frameworks=["numpy"], numpy_scope="process") as installed:
        yield installed


def _made_in() -> tuple[Any, int]:
    return np.ones(8 * MIB, "u1"), threading.get_native_id()


def _run(target: Callable[[], object]) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


@pytest.mark.behaviour("N1")
def test_every_thread_executor_task_and_context_allocates_from_the_pool() -> None:
    made: dict[str, tuple[Any, int]] = {}

    async def in_tasks() -> None:
        async def task() -> tuple[Any, int]:
            return _made_in()

        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as pool:
            made["run_in_executor"] = await loop.run_in_executor(pool, _made_in)
        made["task"] = await asyncio.create_task(task())
        made["to_thread"] = await asyncio.to_thread(_made_in)

    with bridge.installed("host", frameworks=["numpy"], numpy_scope="process"):
        assert bridge.stats().numpy_scope == "process"
        asyncio.run(in_tasks())
        _run(lambda: made.__setitem__("Thread", _made_in()))
        with ThreadPoolExecutor(1) as executor:
            made["ThreadPoolExecutor"] = executor.submit(_made_in).result()
        made["Context"] = contextvars.Context().run(_made_in)
        assert len(made) == 6
        for name, (array, thread) in made.items():
            assert bridge.owns(array), name
            record = bridge.allocation_of(array)
            assert record is not None, name
            assert (record.thread, record.requested_bytes, record.framework) == (thread, 8 * MIB, "numpy"), name
        del array
        made.clear()
        assert (bridge.stats().current_bytes, bridge.stats().current_count) == (0, 0)


def test_process_scope_is_the_default() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        assert bridge.status().numpy_scope == "process"
        found: list[bool] = []
        _run(lambda: found.append(bridge.owns(np.ones(10))))
        assert found == [True]


@pytest.mark.behaviour("N3")
def test_the_name_is_the_bridges_while_installed_and_numpys_after() -> None:
    before = get_handler_name()
    array = np.ones(1)
    for _ in range(3):
        with bridge.installed("host", frameworks=["numpy"], numpy_scope="process"):
            assert {get_handler_name(), get_handler_name(np.empty(1)), get_handler_name(array)} == {numpy_handler.NAME}
            assert np._core.multiarray.get_handler_version(np.empty(1)) == 1  # type: ignore[attr-defined]
            assert contextvars.Context().run(get_handler_name) == numpy_handler.NAME
        assert {get_handler_name(), get_handler_name(np.empty(1))} == {before}
        assert contextvars.Context().run(get_handler_name) == before
        assert not bridge.owns(np.empty(1))


@pytest.mark.behaviour("N3")
def test_a_failed_check_gives_numpy_back_in_name_and_in_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    before = get_handler_name()
    monkeypatch.setattr(numpy_handler, "NAME", "somebody else")
    with pytest.raises(bridge.FrameworkError, match="does not use the bridge's handler"):
        bridge.install("host", frameworks=["numpy"], numpy_scope="process")
    assert not bridge.status().installed
    found: list[tuple[str, bool]] = []
    _run(lambda: found.append((get_handler_name(np.ones(10)), bridge.owns(np.ones(10)))))
    found.append((get_handler_name(), bridge.owns(np.ones(10))))
    assert found == [(before, False)] * 2
    assert eventually(lambda: not bridge.stats().pools)


def test_arrays_of_before_and_after_live_across_any_number_of_installs() -> None:
    kept: list[tuple[Any, int, bool]] = []
    random = np.random.default_rng(7)
    for turn in range(6):
        inside = turn % 2 == 1
        if inside:
            bridge.install("host", frameworks=["numpy"], numpy_scope="process")
        for size in SIZES:
            array = np.full(size, turn, "u1")
            assert bridge.owns(array) == inside
            kept.append((array, turn, inside))
        for index in random.permutation(len(kept))[: len(kept) // 2]:
            array, value, ours = kept[index]
            array.resize(int(random.integers(1, 2 * MIB)), refcheck=False)
            # A block stays with those who gave it, whoever is installed.
            assert bridge.owns(array) == ours
            assert array[0] == value
        for index in sorted(random.permutation(len(kept))[: len(SIZES) // 2], reverse=True):
            kept.pop(index)
        del array
        if inside:
            bridge.uninstall()
    assert all(array[0] == value and bridge.owns(array) == ours for array, value, ours in kept)
    wrong = bridge.stats().foreign_frees
    kept.clear()
    assert bridge.stats().current_count == 0
    assert bridge.stats().foreign_frees == wrong


def test_no_pool_block_enters_numpys_own_table_of_small_blocks() -> None:
    """Pool blocks freed after uninstall, NumPy's own freed while installed: each comes back where it was from."""
    for size in (1, 64, 1000, 1023):
        theirs = [np.empty(size, "u1") for _ in range(20)]
        addresses = {array.ctypes.data for array in theirs}
        with bridge.installed("host", frameworks=["numpy"], numpy_scope="process"):
            ours = [np.empty(size, "u1") for _ in range(20)]
            assert not addresses & {array.ctypes.data for array in ours}
            theirs.clear()
            assert all(bridge.owns(np.empty(size, "u1")) for _ in range(20))
        ours.clear()
        fresh = [np.empty(size, "u1") for _ in range(20)]
        assert not any(map(bridge.owns, fresh))
        # The seven that fit into the table came back out of it.
        assert len(addresses & {array.ctypes.data for array in fresh}) >= 7


def test_uninstall_is_silent_from_any_thread_and_context() -> None:
    for run in (_run, contextvars.Context().run, lambda target: contextvars.copy_context().run(target)):
        bridge.install("host", frameworks=["numpy"], numpy_scope="process")
        array = np.ones(10)
        run(bridge.uninstall)  # a warning would be an error
        assert get_handler_name(array) == "default_allocator"
        assert bridge.owns(array)
        assert not bridge.owns(np.ones(10))


def test_a_context_with_a_handler_of_its_own_keeps_it(process_scope: Any, make_heap: Any) -> None:
    heap = make_heap()
    theirs = numpy_handler.NumpyHandler()
    theirs.use(heap)

    def with_another() -> Any:
        numpy_handler.set_current(theirs.capsule)
        return np.ones(MIB, "u1")

    array = contextvars.Context().run(with_another)
    assert native_pool.pool_containing(array.ctypes.data) is heap
    ours = np.ones(MIB, "u1")
    assert native_pool.pool_containing(ours.ctypes.data) is not heap
    process_scope.uninstall()
    array.resize(2 * MIB, refcheck=False)
    assert native_pool.pool_containing(array.ctypes.data) is heap
    del array, ours
    assert heap.live_count == 0


def test_numpy_allocator_works_inside_and_gives_way_after(process_scope: Any) -> None:
    with bridge.numpy_allocator("host"):
        assert bridge.owns(np.ones(10))
        process_scope.uninstall()
    assert not bridge.owns(np.ones(10))


def test_the_default_handler_set_by_name_is_the_bridges(process_scope: Any) -> None:
    def reset() -> bool:
        numpy_handler.set_current(None)
        return bridge.owns(np.ones(10))

    assert contextvars.Context().run(reset)


def test_one_scope_after_the_other() -> None:
    for scope in ("process", "context", "process"):
        with bridge.installed("host", frameworks=["numpy"], numpy_scope=scope):
            assert bridge.stats().numpy_scope == scope
            other = "context" if scope == "process" else "process"
            with pytest.raises(bridge.InstallError, match="numpy_scope"):
                bridge.install("host", numpy_scope=other)
            assert bridge.install("host", numpy_scope=scope).config.numpy_scope == scope
            found: list[bool] = []
            contextvars.Context().run(lambda: found.append(bridge.owns(np.ones(10))))  # noqa: B023
            assert found == [scope == "process"]


@pytest.mark.behaviour("N5")
def test_a_resize_that_fails_in_another_thread_leaves_the_array_as_it_was() -> None:
    with bridge.installed("host", frameworks=["numpy"], numpy_scope="process", maximum_pool_size="64MiB"):
        array = np.arange(MIB // 8)
        before = bridge.stats().current_bytes
        failed: list[bool] = []

        def grow(array: Any) -> None:
            with pytest.raises(MemoryError):
                array.resize(128 * MIB // 8, refcheck=False)
            failed.append(True)

        _run(lambda: grow(array))  # noqa: F821 - it runs before the array is deleted
        assert failed
        assert array.tolist() == list(range(MIB // 8))
        assert bridge.stats().current_bytes == before
        del array


@pytest.mark.behaviour("N6")
@pytest.mark.parametrize("numpy_min_bytes", [0, 1024])
def test_a_million_one_element_arrays_do_not_fragment_the_pool(numpy_min_bytes: int) -> None:
    with bridge.installed(
        "host", frameworks=["numpy"], numpy_scope="process", numpy_min_bytes=numpy_min_bytes, track="off"
    ) as installed:
        heap = installed._pools.cpu_pool
        kept = [np.empty(1) for _ in range(1000)]  # the slab of this size is there before the first look
        largest, reserved = heap.numbers[3], heap.numbers[0]
        for _ in range(1_000_000):
            np.empty(1)
        assert (heap.numbers[3], heap.numbers[0]) == (largest, reserved)
        assert bridge.owns(kept[0]) == (numpy_min_bytes == 0)
        kept.clear()


@pytest.mark.behaviour("N6")
def test_numpy_min_bytes_leaves_smaller_arrays_to_numpys_own_functions() -> None:
    with bridge.installed("host", frameworks=["numpy"], numpy_scope="process", numpy_min_bytes="1KiB"):
        assert [bridge.owns(np.empty(size, "u1")) for size in (1, 1023, 1024, MIB)] == [False, False, True, True]
        assert [bridge.owns(np.zeros(size, "u1")) for size in (1, 1023, 1024, MIB)] == [False, False, True, True]
        small, large = np.arange(100), np.arange(1000)
        small.resize(1000, refcheck=False)
        large.resize(10, refcheck=False)
        assert (bridge.owns(small), bridge.owns(large)) == (False, True)
        assert (small[:100].tolist(), large.tolist()) == (list(range(100)), list(range(10)))
        del large


@pytest.mark.skipif(c_caller.why_not() is not None, reason=c_caller.why_not() or "")
@pytest.mark.parametrize("installed", [True, False])
def test_calls_without_the_gil(process_scope: Any, tmp_path: Path, installed: bool) -> None:
    caller = c_caller.CThread(numpy_handler.default_handler().capsule, tmp_path)
    if not installed:
        process_scope.uninstall()
    for size in SIZES:
        ptr, thread = caller.allocate(size)
        assert ptr
        record = bridge.allocation_of(ptr)
        assert (record is not None) == installed
        assert record is None or (record.requested_bytes, record.thread, str(record.site)) == (size, thread, "native")
        caller.free(ptr, size)
    assert bridge.stats().current_count == 0


def test_zeros_are_zero_wherever_they_come_from(process_scope: Any) -> None:
    for size in SIZES:
        dirty = np.full(size, 0xFF, "u1")
        del dirty
        assert not np.zeros(size, "u1").any()
    process_scope.uninstall()
    handler = numpy_handler.default_handler()
    assert handler.calloc(1 << 33, 1 << 33) == 0
    assert not any(np.zeros(size, "u1").any() for size in SIZES)
