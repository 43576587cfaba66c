"""Whose line, whose tag, whose block: P1, P2, P3."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import c_caller

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler

MIB = 1 << 20


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with bridge.installed("host", frameworks=["numpy"]):
        yield


def _line() -> int:
    return sys._getframe(1).f_lineno


def _plain() -> tuple[Any, int]:
    return np.empty(MIB, "u1"), _line()


def _call(function: Callable[[], Any]) -> Any:
    return function()


def _lambda() -> tuple[Any, int]:
    return _call(lambda: np.empty(MIB, "u1")), _line()


def _comprehension() -> tuple[Any, int]:
    return [np.empty(MIB, "u1") for _ in range(1)][0], _line()  # noqa: RUF015


def _temporary() -> tuple[Any, int]:
    half = np.empty(MIB // 2, "u1")
    return np.concatenate([half + 1, half]), _line()


def _fromiter() -> tuple[Any, int]:
    return np.fromiter((0 for _ in range(MIB)), "u1"), _line()


def _in_numpys_python() -> tuple[Any, int]:
    return np.full((MIB,), 7, "u1"), _line()


@pytest.mark.behaviour("P1")
@pytest.mark.parametrize("call", [_plain, _lambda, _comprehension, _temporary, _fromiter, _in_numpys_python])
def test_the_record_names_the_users_own_line(call: Callable[[], tuple[Any, int]]) -> None:
    array, line = call()
    record = bridge.allocation_of(array)
    assert record is not None
    assert (record.site.file, record.site.line) == (__file__, line)
    assert record.site.function.startswith(call.__name__)
    assert (record.framework, record.requested_bytes, record.thread) == ("numpy", MIB, threading.get_native_id())
    assert (record.device, record.kind, record.stream) == (-1, "host", 0)


@pytest.mark.behaviour("P1")
def test_a_ufunc_temporary_is_recorded_on_the_line_of_its_expression() -> None:
    array = np.empty(MIB, "u1")
    bridge.record_events(10)
    result = ~(array + 1)
    line = _line() - 1
    events = bridge.history().events
    bridge.record_events(1000, every_event=False)
    made = [event for event in events if event.action == "allocate" and event.requested_bytes == MIB]
    assert made
    assert {(event.site.file, event.site.line, event.framework) for event in made} == {(__file__, line, "numpy")}
    assert bridge.owns(result)


@pytest.mark.behaviour("P1")
def test_a_worker_thread_is_recorded_with_its_line_and_thread() -> None:
    found: dict[str, Any] = {}

    def work() -> None:
        with bridge.numpy_allocator("host"):
            found["array"], found["line"] = np.empty(MIB, "u1"), _line()
        found["thread"] = threading.get_native_id()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    record = bridge.allocation_of(found["array"])
    assert record is not None
    assert (record.site.file, record.site.line, record.thread) == (__file__, found["line"], found["thread"])
    assert (record.framework, record.requested_bytes) == ("numpy", MIB)
    assert record.thread != threading.get_native_id()


@pytest.mark.behaviour("P1")
@pytest.mark.skipif(c_caller.why_not() is not None, reason=c_caller.why_not() or "")
def test_a_compiled_caller_without_a_python_frame_is_native(tmp_path: Path) -> None:
    caller = c_caller.CThread(numpy_handler.current(), tmp_path)
    with bridge.tag("not the C thread's"):
        ptr, thread = caller.allocate(MIB)
    record = bridge.allocation_of(ptr)
    assert record is not None
    assert (str(record.site), record.tag) == ("native", "")
    assert (record.framework, record.requested_bytes, record.thread) == ("numpy", MIB, thread)
    assert thread != threading.get_native_id()
    caller.free(ptr, MIB)
    ptr, _ = caller.allocate(MIB, "pt_autograd_0")
    record = bridge.allocation_of(ptr)
    assert record is not None
    assert record.site == ("native thread pt_autograd_0", 0, "", None, False)
    caller.free(ptr, MIB)
    assert bridge.stats().current_count == 0


@pytest.mark.behaviour("P1")
def test_lines_of_numpy_are_skipped_however_deep() -> None:
    grid = np.meshgrid(np.arange(512), np.arange(512), copy=True)
    line = _line() - 1
    padded = np.pad(np.empty(1000, "u1"), 500)
    # Python code of NumPy allocates in both; no record may name it.
    sites = {bridge.allocation_of(array).site for array in (*grid, padded)}  # type: ignore[union-attr]
    assert {(site.file, site.line) for site in sites} == {(__file__, line), (__file__, line + 2)}


def _tag_of(array: Any) -> str:
    record = bridge.allocation_of(array)
    assert record is not None
    return record.tag


@pytest.mark.behaviour("P2")
def test_tags_nest_and_a_thread_has_its_own() -> None:
    found: dict[str, Any] = {}

    def work() -> None:
        with bridge.numpy_allocator("host"):
            found["bare"] = np.empty(MIB, "u1")
            with bridge.tag("c"):
                found["thread"] = np.empty(MIB, "u1")

    with bridge.tag("a"):
        found["first"] = np.empty(MIB, "u1")
        with bridge.tag("b"):
            found["second"] = np.empty(MIB, "u1")
        found["third"] = np.empty(MIB, "u1")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        found["fourth"] = np.empty(MIB, "u1")
    found["outside"] = np.empty(MIB, "u1")

    # As `contextvars` has it: a new thread starts without a tag, or with its starter's where Python is set up so.
    inherited = getattr(sys.flags, "thread_inherit_context", 0)
    assert {name: _tag_of(array) for name, array in found.items()} == {
        "first": "a",
        "second": "a/b",
        "third": "a",
        "bare": "a" if inherited else "",
        "thread": "a/c" if inherited else "c",
        "fourth": "a",
        "outside": "",
    }
    assert bridge.snapshot().by("tag")["a"] == (4 if inherited else 3) * MIB
    found.clear()


@pytest.mark.behaviour("P2")
def test_tags_do_not_leak_between_tasks() -> None:
    async def work(name: str, barrier: asyncio.Barrier) -> tuple[str, str]:
        with bridge.tag(name):
            await barrier.wait()
            first = _tag_of(np.empty(10))
            await barrier.wait()
        return first, _tag_of(np.empty(10))

    async def main() -> list[tuple[str, str]]:
        barrier = asyncio.Barrier(3)
        with bridge.tag("outer"):
            return await asyncio.gather(*(work(name, barrier) for name in "xyz"))

    assert asyncio.run(main()) == [("outer/x", "outer"), ("outer/y", "outer"), ("outer/z", "outer")]
    assert _tag_of(np.empty(10)) == ""


@pytest.mark.behaviour("P2")
def test_an_exception_that_leaves_a_tag_restores_the_outer_one() -> None:
    with bridge.tag("outer"):
        with pytest.raises(ZeroDivisionError), bridge.tag("inner"):
            raise ZeroDivisionError
        assert _tag_of(np.empty(10)) == "outer"
    assert _tag_of(np.empty(10)) == ""


@pytest.mark.behaviour("P2")
def test_one_tag_object_may_be_entered_again_and_inside_itself() -> None:
    mark = bridge.tag("again")
    with mark:
        with mark:
            assert _tag_of(np.empty(10)) == "again/again"
        assert _tag_of(np.empty(10)) == "again"
    with mark:
        assert _tag_of(np.empty(10)) == "again"


@pytest.mark.behaviour("P2")
@pytest.mark.parametrize("name", ["", "x" * 201, None, 7, b"bytes"])
def test_a_tag_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(bridge.ConfigError, match="text of 1 to 200 characters"):
        bridge.tag(name)


def test_every_address_of_a_slab_leads_to_its_block(host_heap: Any) -> None:
    """For every class of sizes, to the last block of a slab: an address that is found in its neighbour frees that."""
    classes = [64 * unit for unit in range(1, 9)]
    classes += [(64 << power) * (8 + eighth) // 8 for power in range(3, 15) for eighth in range(1, 9)]
    for size_bytes in classes:
        count = max((2 * MIB) // size_bytes, 8) + 1  # one more than the first slab has
        ptrs = [host_heap.allocate(size_bytes, cpu=True) for _ in range(count)]
        for ptr in (*ptrs[:3], *ptrs[-4:]):
            serial = bridge.allocation_of(ptr).serial
            assert bridge.allocation_of(ptr + size_bytes - 1).serial == serial, size_bytes
            assert bridge.allocation_of(ptr + size_bytes // 2).serial == serial, size_bytes
        for ptr in ptrs:
            host_heap.deallocate(ptr)
    assert host_heap.live_count == 0


@pytest.mark.behaviour("P3")
def test_views_and_interior_addresses_lead_to_one_record() -> None:
    array = np.empty(4 * MIB, "u1")
    views = [array[index * 1000 :] for index in range(5)] + [array[::-1], array.reshape(4, -1).T, array.view("f8")]
    views += [array[None], array[:0]]
    start = array.ctypes.data
    record = bridge.allocation_of(array)
    assert record is not None
    for place in (array[1000:], start, start + 1, start + 4 * MIB - 1, np.int64(start), *views[:-1]):
        assert bridge.allocation_of(place) == record
    assert bridge.allocation_of(start + 4 * MIB) != record
    assert bridge.allocation_of(start - 1) != record
    snapshot = bridge.snapshot()
    assert [(each.ptr, each.requested_bytes) for each in snapshot] == [(start, 4 * MIB)]
    assert snapshot.allocations[0] == record


@pytest.mark.behaviour("P3")
def test_the_end_of_a_block_that_does_not_fill_its_class_is_nobodys() -> None:
    array = np.empty(100_001, "u1")
    assert bridge.allocation_of(array.ctypes.data + 100_000) == bridge.allocation_of(array)
    assert bridge.allocation_of(array.ctypes.data + 100_001) is None


@pytest.mark.behaviour("P3")
@pytest.mark.parametrize("place", [0, 1 << 60, (1 << 64) - 1, b"bytes".__sizeof__(), id(numpy_handler)])
def test_an_address_outside_has_no_record(place: int) -> None:
    assert bridge.allocation_of(place) is None
    assert not bridge.owns(place)


@pytest.mark.behaviour("P3")
@pytest.mark.parametrize("thing", [None, "text", 1.5, object(), [1, 2]])
def test_a_thing_without_an_address_is_refused(thing: Any) -> None:
    with pytest.raises(bridge.ViewError, match="has no address"):
        bridge.allocation_of(thing)


@pytest.mark.behaviour("P3")
@pytest.mark.parametrize("place", [-1, 1 << 64, 1 << 100])
def test_an_impossible_address_has_no_record(place: int) -> None:
    assert bridge.allocation_of(place) is None
    assert not bridge.owns(place)


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
