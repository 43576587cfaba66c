"""Kinds of mistakes that a review found once, each of which would come back unseen."""

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest
from helpers.programs import must_succeed, run_python

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import core


@pytest.mark.behaviour("P2")
def test_one_tag_object_serves_tasks_that_interleave() -> None:
    shared = bridge.tag("shared")
    seen: list[str] = []

    async def use(first: asyncio.Event, then: asyncio.Event) -> None:
        with shared:
            first.set()
            await then.wait()
            array = np.ones(10)
            record = bridge.allocation_of(array)
            seen.append("" if record is None else record.tag)

    async def both() -> None:
        a, b = asyncio.Event(), asyncio.Event()
        await asyncio.gather(use(a, b), use(b, a))

    with bridge.installed("host", frameworks=["numpy"]):
        asyncio.run(both())
        after = np.ones(10)
        record = bridge.allocation_of(after)
        assert record is not None and record.tag == ""
        del after
    assert seen == ["shared", "shared"]


def test_a_peak_scope_is_entered_once_at_a_time() -> None:
    scope = bridge.peak_scope()
    with scope, pytest.raises(bridge.ConfigError, match="entered already"), scope:
        pass
    with scope:
        assert scope.peak_bytes >= 0


def test_trimming_while_a_pool_closes_gives_each_piece_back_once() -> None:
    for _ in range(30):
        heap = core.host_heap()
        heap.deallocate(heap.allocate(1 << 20))
        threads = [threading.Thread(target=call) for call in (heap.trim, heap.retire, heap.trim)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert heap.close()
        assert heap.numbers[0] == 0


def test_resizing_without_tracking_keeps_the_live_bytes_right(make_heap: Any) -> None:
    heap = make_heap(track="off")
    from rmm_managed_bridge._native import numpy_handler

    handler = numpy_handler.NumpyHandler()
    handler.use(heap)
    ptr = handler.malloc(100)
    for size in (5_000, 70, 3 << 20, 64):
        ptr = handler.realloc(ptr, size)
        assert size <= heap.live_bytes < 2 * size + 64
    handler.free(ptr)
    assert heap.live_bytes == 0
    handler.use(None)


def test_installing_for_no_framework_hooks_none() -> None:
    with bridge.installed("host", frameworks=[]):
        assert bridge.status().frameworks == {}
        assert not bridge.owns(np.ones(100))


def test_a_failed_reinitialize_leaves_the_bridge_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import rmm

    def fails(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no such pool")

    monkeypatch.setattr(rmm.rmm, "_initialize", fails)
    with bridge.installed("host", frameworks=["numpy"]):
        with pytest.raises(MemoryError, match="no such pool"):
            rmm.reinitialize()
        assert bridge.status().installed
        assert bridge.owns(np.ones(100))


def test_an_installation_that_fails_late_leaves_numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(around: object) -> None:
        raise ImportError("no rmm here")

    monkeypatch.setattr("rmm_managed_bridge.reinitialize.watch", fails)
    with pytest.raises(ImportError):
        bridge.install("host", frameworks=["numpy"])
    assert not bridge.status().installed
    assert not bridge.owns(np.ones(100))


@pytest.mark.behaviour("I2")
@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", "u1"), ("b", "f8")], align=True),
        np.dtype([("only", "i4")]),
        np.dtype([("outer", [("inner", "f4")]), ("rest", "i2")]),
    ],
    ids=["padded", "one field", "nested"],
)
def test_fields_are_kept_through_the_array_interface(dtype: "np.dtype[Any]") -> None:
    class Interface:
        def __init__(self, array: "np.ndarray[Any, Any]") -> None:
            self.kept = array
            self.__array_interface__ = array.__array_interface__

    with bridge.installed("host", frameworks=["numpy"]):
        array = np.zeros(5, dtype)
        view = bridge.as_numpy(Interface(array))
        assert view.dtype.fields is not None and dtype.fields is not None
        for name, (kind, offset, *_) in dtype.fields.items():
            assert view.dtype.fields[name][:2] == (kind, offset)
        assert np.shares_memory(view, array)
        del view, array
        gc.collect()


@pytest.mark.behaviour("L8")
def test_a_child_of_a_parent_that_only_imported_the_bridge_may_install() -> None:
    program = """
import os
import rmm_managed_bridge as bridge
child = os.fork()
if child == 0:
    import numpy as np
    with bridge.installed("host", frameworks=["numpy"]):
        os._exit(0 if bridge.owns(np.ones(1000)) else 3)
os.waitpid(child, 0)[1] == 0 or os._exit(4)
"""
    must_succeed(run_python(program))


def test_using_the_allocator_again_and_again_makes_no_new_handlers() -> None:
    from rmm_managed_bridge.adapters import numpy_allocator as adapter

    with bridge.installed("host", frameworks=["numpy"], numpy_scope="context"):
        with bridge.numpy_allocator():
            before = len(adapter._handlers)
        for _ in range(10):
            with bridge.numpy_allocator(), bridge.numpy_allocator():
                assert bridge.owns(np.ones(10))
        assert len(adapter._handlers) == before
