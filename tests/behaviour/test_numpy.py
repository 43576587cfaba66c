"""NumPy through the handler: scope, growth, zeros: N2, N4, N5, N7."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers.programs import must_succeed, run_python

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler

MIB = 1 << 20
get_handler_name: Callable[..., str] = np._core.multiarray.get_handler_name  # type: ignore[attr-defined]


def _make() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.ones(8 * MIB, "u1")


async def _in_tasks() -> dict[str, "np.ndarray[tuple[int], np.dtype[np.uint8]]"]:
    async def task() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        return _make()

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        return {
            "task": await asyncio.create_task(task()),
            "to_thread": await asyncio.to_thread(_make),
            "run_in_executor": await loop.run_in_executor(pool, _make),
        }


@pytest.mark.behaviour("N2")
def test_context_scope_follows_numpys_own_rules_and_says_so() -> None:
    with bridge.installed("host", frameworks=["numpy"], numpy_scope="context"):
        assert bridge.stats().numpy_scope == "context"
        arrays = asyncio.run(_in_tasks())
        thread = threading.Thread(target=lambda: arrays.__setitem__("Thread", _make()))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            arrays["ThreadPoolExecutor"] = pool.submit(_make).result()
        arrays["Context"] = contextvars.Context().run(_make)
        owned = {name for name, array in arrays.items() if bridge.owns(array)}
    # A free-threaded or 3.14 interpreter may let threads inherit the context; then plain threads are owned as well.
    inherited = {"Thread", "ThreadPoolExecutor", "run_in_executor"} if _threads_inherit_context() else set()
    assert owned == {"task", "to_thread"} | inherited
    assert bridge.stats().numpy_scope is None
    assert all(array.all() for array in arrays.values())


def _threads_inherit_context() -> bool:
    variable: contextvars.ContextVar[bool] = contextvars.ContextVar("inherited", default=False)
    found: list[bool] = []

    def run() -> None:
        variable.set(True)
        thread = threading.Thread(target=lambda: found.append(variable.get()))
        thread.start()
        thread.join()

    contextvars.copy_context().run(run)
    return found[0]


@pytest.mark.behaviour("N2")
def test_a_thread_inside_its_own_scope_keeps_the_pool_when_another_leaves(host_heap: Any) -> None:
    entered, left = threading.Barrier(2), threading.Barrier(2)
    owned: dict[str, bool] = {}

    def first() -> None:
        with bridge.numpy_allocator("host"):
            entered.wait(10)
        left.wait(10)

    def second() -> None:
        with bridge.numpy_allocator("host"):
            entered.wait(10)
            left.wait(10)
            owned["inside"] = bridge.owns(np.ones(10))
        owned["after"] = bridge.owns(np.ones(10))

    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert owned == {"inside": True, "after": False}


@pytest.mark.behaviour("N2")
@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_two_threads_in_context_scope_share_one_bridge_until_the_last_leaves(first_leaves_first: bool) -> None:
    step = threading.Barrier(2, timeout=20)
    found: dict[str, bool] = {}
    failures: list[BaseException] = []

    def body(name: str, *, opens_first: bool, leaves_first: bool) -> None:
        try:
            before = get_handler_name()
            if not opens_first:
                step.wait()
            with bridge.installed("host", frameworks=["numpy"], numpy_scope="context"):
                if opens_first:
                    step.wait()
                step.wait()  # both are inside
                found[f"{name} inside"] = bridge.owns(np.ones(10))
                if not leaves_first:
                    step.wait()  # the other has left
                    found[f"{name} alone"] = bridge.owns(np.ones(10))
                    assert bridge.stats().numpy_scope == "context"
            found[f"{name} after"] = bridge.owns(np.ones(10))
            assert get_handler_name() == before
            if leaves_first:
                step.wait()
        except BaseException as error:
            failures.append(error)
            step.abort()

    threads = [
        threading.Thread(target=body, args=(name,), kwargs={"opens_first": opens, "leaves_first": leaves})
        for name, opens, leaves in (("first", True, first_leaves_first), ("second", False, not first_leaves_first))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = "second" if first_leaves_first else "first"
    assert failures == []
    assert found == {
        "first inside": True,
        "second inside": True,
        f"{last} alone": True,
        "first after": False,
        "second after": False,
    }
    assert not bridge.status().installed
    assert bridge.stats().pools == ()


@pytest.mark.behaviour("N2")
def test_a_block_in_another_thread_reaches_it_and_leaves_what_install_has_installed() -> None:
    bridge.install("host", frameworks=["numpy"], numpy_scope="context")
    found: list[bool] = []

    def body() -> None:
        for _ in range(2):
            found.append(bridge.owns(np.ones(10)))
            with bridge.installed(), bridge.installed():
                found.append(bridge.owns(np.ones(10)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [_threads_inherit_context(), True] * 2
    assert bridge.owns(np.ones(10))
    bridge.uninstall()
    assert not bridge.owns(np.ones(10))


@pytest.mark.behaviour("N4")
def test_fromiter_grows_under_one_record_with_the_line_that_called_it() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        array = np.fromiter((float(number) for number in range(5_000)), np.float64)
        record = bridge.allocation_of(array)
        assert record is not None
        assert (record.requested_bytes, record.site.file) == (40_000, __file__)
        assert record.resized_count > 0
        assert array.tolist() == list(range(5_000))
        assert [each.ptr for each in bridge.snapshot()] == [array.ctypes.data]
        del array


@pytest.mark.behaviour("N4")
@pytest.mark.parametrize("dtype", ["f8", "u1", "O"])
def test_resize_keeps_contents_alignment_and_one_record(dtype: str) -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        array = np.arange(10).astype(dtype)
        origin = bridge.allocation_of(array)
        assert origin is not None
        for count, size in enumerate((1_000, 5, 0, 1_000_000), start=1):
            before = array.tolist()
            array.resize(size, refcheck=False)
            kept = min(len(before), size)
            assert array[:kept].tolist() == before[:kept]
            assert not any(array[kept:].tolist())
            assert array.ctypes.data % 64 == 0
            record = bridge.allocation_of(array.ctypes.data)
            assert record is not None
            # Of no element NumPy keeps one byte, or one element (2.1).
            assert record.requested_bytes in ((size * array.itemsize,) if size else (1, array.itemsize))
            assert (record.site, record.serial, record.resized_count) == (origin.site, origin.serial, count)
            assert [each.serial for each in bridge.snapshot()] == [origin.serial]
            assert bridge.stats().current_bytes == record.requested_bytes
        del array


@pytest.mark.behaviour("N5")
def test_a_resize_that_fails_leaves_the_array_as_it_was() -> None:
    with bridge.installed("host", frameworks=["numpy"], maximum_pool_size="64MiB"):
        array = np.arange(MIB // 8)
        before = bridge.stats()
        record = bridge.allocation_of(array)
        with pytest.raises(MemoryError):
            array.resize(128 * MIB // 8, refcheck=False)
        assert array.tolist() == list(range(MIB // 8))
        assert bridge.allocation_of(array) == record
        after = bridge.stats()
        assert (after.current_bytes, after.current_count) == (before.current_bytes, before.current_count)
        assert after.failures == before.failures + 1
        del array
        assert bridge.stats().current_bytes == before.current_bytes - MIB


@pytest.mark.behaviour("N5")
def test_a_resize_after_a_pool_switch_stays_in_its_own_pool() -> None:
    bridge.install("host", frameworks=["numpy"])
    array = np.arange(MIB // 8)
    bridge.uninstall()
    bridge.install("host", frameworks=["numpy"])
    old, new = bridge.stats().pools
    array.resize(4 * MIB // 8, refcheck=False)
    assert array[: MIB // 8].tolist() == list(range(MIB // 8))
    assert not array[MIB // 8 :].any()
    now = {each.number: each for each in bridge.stats().pools}
    assert (now[old.number].current_bytes, now[old.number].current) == (4 * MIB, False)
    assert now[new.number] == new
    bridge.uninstall()
    del array


@pytest.mark.behaviour("N7")
def test_recycled_memory_is_zero_when_zeros_are_promised() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        seen = set()
        for _ in range(1_000):
            dirty = np.full(MIB, 0xFF, "u1")
            seen.add(dirty.ctypes.data)
            del dirty
            clean = np.zeros(MIB, "u1")
            assert not clean.any()
            if clean.ctypes.data in seen:
                break
        else:
            pytest.fail("no address ever came back, so nothing was shown")
        del clean


@pytest.mark.behaviour("N7")
def test_a_product_above_64_bits_gives_no_block_at_all(host_heap: Any) -> None:
    handler = numpy_handler.NumpyHandler()
    handler.use(host_heap)
    before = bridge.stats()
    assert handler.calloc(1 << 33, 1 << 33) == 0
    assert handler.calloc((1 << 63) + 1, 2) == 0
    assert bridge.stats().current_count == before.current_count
    handler.use(None)
    with bridge.installed("host", frameworks=["numpy"]), pytest.raises((MemoryError, ValueError)):
        np.zeros((1 << 33, 1 << 33), "u1")


@pytest.mark.behaviour("N2")
def test_the_name_of_the_handler_is_right_without_other_packages() -> None:
    must_succeed(
        run_python(
            """
            import numpy as np
            import rmm_managed_bridge as bridge

            with bridge.installed("host", frameworks=["numpy"], numpy_scope="context"):
                array = np.empty(1)
            assert np._core.multiarray.get_handler_name(array) == "rmm_managed_bridge"
            assert np._core.multiarray.get_handler_version(array) == 1
            assert np._core.multiarray.get_handler_name(np.empty(1)) == "default_allocator"
            """
        )
    )


def test_using_the_allocator_again_and_again_makes_no_new_handlers() -> None:
    from rmm_managed_bridge.adapters import numpy_allocator as adapter

    with bridge.installed("host", frameworks=["numpy"], numpy_scope="context"):
        with bridge.numpy_allocator():
            before = len(adapter._handlers)
        for _ in range(10):
            with bridge.numpy_allocator(), bridge.numpy_allocator():
                assert bridge.owns(np.ones(10))
        assert len(adapter._handlers) == before
