"""Advice ends with its block: what the native core undoes when a block is freed, and on which pages."""

import os

import pytest
from fake_cuda import GLOBAL, RELAXED, THREAD_LOCAL, FakeCuda, Page
from fake_cuda.pool import MIB, Bench
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmm_managed_bridge._native import hint_table
from rmm_managed_bridge._native.hint_table import CPU, PREFERRED, READ_MOSTLY

pytestmark = pytest.mark.fake_driver

PAGE = os.sysconf("SC_PAGE_SIZE")
ADVICE = {READ_MOSTLY: (1, CPU), PREFERRED: (3, CPU)}


def advise(fake: FakeCuda, ptr: int, size_bytes: int, advice: int, accessors: tuple[int, ...] = ()) -> tuple[int, int]:
    """Advise as the package does: note it, then tell the driver. Return the pages."""
    from fake_cuda.hints import FakeHints

    room = FakeHints(fake)
    pages = ptr // PAGE * PAGE, -(-(ptr + size_bytes) // PAGE) * PAGE
    assert hint_table.note(ptr, *pages, advice, accessors)
    with hint_table.driver_scope(ptr):
        if advice & READ_MOSTLY:
            room.advise(pages, "SET_READ_MOSTLY", CPU)
        if advice & PREFERRED:
            room.advise(pages, "SET_PREFERRED_LOCATION", CPU)
        for place in accessors:
            room.advise(pages, "SET_ACCESSED_BY", place)
    return pages


@pytest.mark.parametrize("size_bytes", [1 << 16, 8 * MIB])
@pytest.mark.parametrize("side", ["cpu", "stream"])
def test_the_next_owner_inherits_no_advice(bench: Bench, side: str, size_bytes: int) -> None:
    stream = bench.owned() if side == "stream" else None
    ptr = bench.allocate(size_bytes, stream, cpu=side == "cpu")
    low, high = advise(bench.fake, ptr, size_bytes, READ_MOSTLY | PREFERRED, (0, 1, CPU))
    assert bench.fake.page(low) == Page(True, CPU, (CPU, 0, 1))
    bench.free(ptr, stream)
    again = bench.allocate(size_bytes, stream, cpu=side == "cpu")
    assert again == ptr
    assert {bench.fake.page(page) for page in range(low, high, PAGE)} == {Page()}
    assert hint_table.hints_at(again) == (0, 0, 0, (), hint_table.NOWHERE)


def test_a_block_without_hints_makes_no_call_when_freed(bench: Bench) -> None:
    ptr, placed = (bench.allocate(1 << 16, cpu=True) for _ in range(2))
    hint_table.place(placed, 0)
    bench.fake.clear()
    bench.free(ptr)
    bench.free(placed)
    assert bench.fake.calls("cuMemAdvise") == 0


def test_neighbours_on_one_page_keep_their_advice_and_the_last_one_ends_it_all(bench: Bench) -> None:
    first, second, third = (bench.allocate(1024, cpu=True) for _ in range(3))
    (page,) = {ptr // PAGE * PAGE for ptr in (first, second, third)}
    advise(bench.fake, first, 1024, READ_MOSTLY)
    advise(bench.fake, second, 1024, PREFERRED, (0,))
    bench.free(first)
    assert bench.fake.page(page) == Page(True, CPU, (0,)), (
        "the page is advised for as long as anybody's advice is on it"
    )
    bench.free(third)
    bench.free(second)
    assert bench.fake.page(page) == Page()


SIZES = [64, 1024, 3000, 5000, 12_000]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_page_has_the_advice_of_the_live_blocks_on_it_and_no_other(fake: FakeCuda, data: st.DataObject) -> None:
    bench = Bench(fake)
    try:
        sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=3))
        blocks = {bench.allocate(size, cpu=True): size for size in sizes}
        advised: dict[int, list[tuple[range, int]]] = {}
        for ptr in data.draw(st.lists(st.sampled_from(sorted(blocks)), max_size=12)):
            start = data.draw(st.integers(0, blocks[ptr] - 1))
            size = data.draw(st.integers(1, blocks[ptr] - start))
            advice = data.draw(st.sampled_from([READ_MOSTLY, PREFERRED]))
            pages = range(*advise(fake, ptr + start, size, advice), PAGE)
            advised.setdefault(ptr, []).append((pages, advice))
        seen = {page for each in advised.values() for pages, _ in each for page in pages}
        for ptr in data.draw(st.permutations(sorted(blocks))):
            bench.free(ptr)
            advised.pop(ptr, None)
            still = [(page, advice) for each in advised.values() for pages, advice in each for page in pages]
            for page, advice in still:
                found = fake.page(page)
                assert found.read_mostly if advice == READ_MOSTLY else found.preferred == CPU
            for page in seen - {page for page, _ in still}:
                assert fake.page(page) == Page()
    finally:
        bench.close()


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_free_with_advice_leaves_a_capture_alone_and_waits_for_nothing(bench: Bench, mode: int) -> None:
    stream, captured = bench.owned(), bench.owned(blocking=True)
    ptr = bench.allocate(8 * MIB, stream)
    operation = bench.fake.enqueue(stream)
    low, _ = advise(bench.fake, ptr, 8 * MIB, READ_MOSTLY)
    bench.fake.begin_capture(captured, mode)
    bench.free(ptr, stream)
    assert bench.fake.end_capture(captured)
    assert bench.fake.page(low) == Page() and not bench.fake.done(operation)


def test_a_thread_without_a_context_undoes_advice_and_has_none_afterwards(bench: Bench) -> None:
    ptr = bench.allocate(8 * MIB, cpu=True)
    low, _ = advise(bench.fake, ptr, 8 * MIB, PREFERRED)
    bench.fake.set_current(None)
    bench.free(ptr)
    assert bench.fake.page(low) == Page() and bench.fake.lib.fake_context_depth() == 0
    bench.fake.set_current(0)


def test_no_lock_is_held_while_the_driver_is_called(bench: Bench) -> None:
    """The driver's call takes the table's lock, and the pool's, itself here: with either held it would never end."""
    ptr, other = bench.allocate(8 * MIB, cpu=True), bench.allocate(8 * MIB, cpu=True)
    advise(bench.fake, ptr, 8 * MIB, READ_MOSTLY)

    def inside() -> None:
        hint_table.place(other, 0)
        bench.heap.deallocate(bench.heap.allocate(1024, cpu=True))

    bench.fake.on_call("cuMemAdvise", inside)
    bench.free(ptr)
    assert hint_table.hints_at(other)[4] == 0


def test_a_driver_that_refuses_to_undo_does_not_stop_the_free(bench: Bench) -> None:
    ptr = bench.allocate(8 * MIB, cpu=True)
    advise(bench.fake, ptr, 8 * MIB, READ_MOSTLY)
    bench.fake.fail("cuMemAdvise")
    bench.free(ptr)
    assert bench.heap.live_count == 0 and hint_table.hints_at(ptr)[2] == 0


def test_an_array_that_moves_when_it_is_resized_leaves_its_advice_behind(bench: Bench) -> None:
    from rmm_managed_bridge._native.numpy_handler import NumpyHandler

    handler = NumpyHandler()
    handler.use(bench.heap)
    ptr = handler.malloc(8 * MIB)
    low, _ = advise(bench.fake, ptr, 8 * MIB, READ_MOSTLY)
    moved = handler.realloc(ptr, 64 * MIB)
    assert moved != ptr
    assert bench.fake.page(low) == Page() and hint_table.hints_at(moved)[2] == 0
    handler.free(moved)


def test_an_array_that_is_freed_while_it_moves_is_not_had_by_two(bench: Bench) -> None:
    """A mistake of the caller's, here in the wait for the device. The resize fails, and no block is given twice."""
    from rmm_managed_bridge._native.numpy_handler import NumpyHandler

    handler = NumpyHandler()
    handler.use(bench.heap)
    stream = bench.owned()
    ptr = handler.malloc(8 * MIB)
    bench.expose(ptr, stream)
    bench.fake.enqueue(stream)
    bench.fake.on_call("cuEventSynchronize", lambda: bench.heap.deallocate(ptr))
    assert handler.realloc(ptr, 64 * MIB) == 0
    assert bench.heap.live_count == 0 and bench.heap.live_bytes == 0
    bench.fake.finish_all()
    taken = [bench.allocate(8 * MIB, cpu=True) for _ in range(16)]
    assert len(set(taken)) == len(taken)
    assert bench.close()


def test_a_note_is_refused_where_no_block_lives(bench: Bench) -> None:
    ptr = bench.allocate(1 << 16, cpu=True)
    bench.free(ptr)
    assert not hint_table.note(ptr, ptr, ptr + PAGE, READ_MOSTLY)
    assert not hint_table.place(ptr, 0)
    assert not hint_table.note(0x1000, 0x1000, 0x2000, READ_MOSTLY)
    with pytest.raises(ValueError, match="between 0 and 62"):
        hint_table.note(ptr, ptr, ptr + PAGE, 0, (63,))
