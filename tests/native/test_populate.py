"""Managed memory that no block has had before is prefetched to the device, once, when a block of a device has it."""

import threading
from typing import Any

import pytest
import rmm
from fake_cuda import FakeCuda, Hook
from fake_cuda.hints import FakeHints, using_installed
from fake_cuda.pool import KIB, MIB, Bench
from helpers.programs import HostMemory
from helpers.rmm_stream import rmm_stream

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import process

pytestmark = pytest.mark.fake_driver


@pytest.fixture
def bench(fake: FakeCuda) -> Bench:
    return Bench(fake, populate=True)


def ranges(bench: Bench) -> list[tuple[int, int]]:
    return [(each.low, each.size_bytes) for each in bench.fake.prefetches()]


def empty(bench: Bench) -> None:
    for ptr, (_, stream) in list(bench.live.items()):
        bench.free(ptr, stream)
    bench.heap.trim()


@pytest.mark.behaviour("A4")
def test_what_a_block_is_the_first_to_have_is_prefetched_once(bench: Bench) -> None:
    stream = bench.owned()
    count, size_bytes = process.populate_counters()
    ptr = bench.allocate(48 * MIB, stream)
    assert ranges(bench) == [(ptr, 48 * MIB)]
    assert process.populate_counters() == (count + 1, size_bytes + 48 * MIB)
    bench.free(ptr, stream)
    for size in (48 * MIB, 24 * MIB, 40 * MIB):
        bench.free(bench.allocate(size, stream), stream)
    assert not [low for low, size_bytes in ranges(bench)[1:] if low < ptr + 48 * MIB and ptr < low + size_bytes]
    empty(bench)


@pytest.mark.behaviour("A4")
def test_it_is_on_a_stream_of_the_bridges_own_that_nobody_waits_for(bench: Bench) -> None:
    stream = bench.owned()
    bench.fake.clear()
    bench.allocate(8 * MIB, stream)
    (done,) = bench.fake.prefetches()
    assert done.stream not in (0, 1, 2, stream.handle)
    assert (done.place, done.context, done.gil_held) == (0, 0, 0)
    assert {"cuStreamWaitEvent", "cuEventRecord", "cuEventSynchronize"}.isdisjoint(bench.fake.trace())
    assert bench.fake.violations() == []
    empty(bench)


@pytest.mark.behaviour("A4")
def test_small_blocks_and_those_of_the_cpu_are_left_to_faults(bench: Bench) -> None:
    stream = bench.owned()
    bench.allocate(512 * KIB, stream)
    bench.allocate(16 * MIB, cpu=True)
    assert ranges(bench) == []
    empty(bench)


@pytest.mark.behaviour("A4")
def test_each_block_of_a_slab_has_its_pages_and_no_page_twice(bench: Bench) -> None:
    stream = bench.owned()
    blocks = [bench.allocate(MIB, stream) for _ in range(24)]
    covered: set[int] = set()
    for low, size_bytes in ranges(bench):
        pages = set(range(low >> 16, (low + size_bytes) >> 16))
        assert not covered & pages, "a page was prefetched twice"
        covered |= pages
    missed = [ptr for ptr in blocks if not set(range(ptr >> 16, (ptr + MIB) >> 16)) <= covered]
    assert len(missed) <= len(blocks) // 4, "more than at the borders of slabs"
    empty(bench)


@pytest.mark.behaviour("A4")
def test_what_comes_back_from_upstream_is_fresh_again(bench: Bench) -> None:
    stream = bench.owned()
    bench.allocate(48 * MIB, stream)
    empty(bench)
    bench.fake.clear()
    ptr = bench.allocate(48 * MIB, stream)
    assert ranges(bench) == [(ptr, 48 * MIB)]
    empty(bench)


@pytest.mark.behaviour("A4")
@pytest.mark.parametrize("settings", [{"populate": False}, {"concurrent": False}, {"pool": "debug"}])
def test_it_is_not_done_where_it_was_not_wanted_or_cannot_help(fake: FakeCuda, settings: dict[str, Any]) -> None:
    bench = Bench(fake, **{"populate": True, **settings})
    bench.allocate(8 * MIB, bench.owned())
    assert ranges(bench) == []
    empty(bench)


@pytest.mark.behaviour("A4")
def test_a_card_that_is_nearly_full_is_left_alone(bench: Bench) -> None:
    bench.fake.fill_by_others(60 << 30)  # of 64 GiB: a tenth has to stay free
    bench.allocate(8 * MIB, bench.owned())
    assert ranges(bench) == []
    empty(bench)


@pytest.mark.behaviour("A4")
@pytest.mark.parametrize("call", ["cuMemGetInfo", "cuMemPrefetchAsync"])
def test_a_driver_that_refuses_costs_speed_alone(bench: Bench, call: str) -> None:
    stream = bench.owned()
    bench.allocate(8 * MIB, stream)
    before = process.populate_counters()
    bench.fake.fail(call)
    bench.allocate(40 * MIB, stream)
    assert process.populate_counters() == before
    empty(bench)


@pytest.mark.behaviour("A4")
def test_a_capture_of_another_stream_goes_on(bench: Bench) -> None:
    captured, stream = bench.owned(), bench.owned()
    bench.fake.begin_capture(captured)
    bench.allocate(8 * MIB, stream)
    assert len(ranges(bench)) == 1 and bench.fake.violations() == []
    assert bench.fake.end_capture(captured)
    empty(bench)


@pytest.mark.behaviour("A4")
def test_other_threads_allocate_meanwhile(bench: Bench) -> None:
    """No lock of the pool's is held during the call, nor the GIL."""
    stream, other = bench.owned(), bench.owned()
    done = threading.Event()

    def allocate() -> None:
        bench.fake.set_current(0)
        bench.allocate(MIB, other)
        done.set()

    thread = threading.Thread(target=allocate)

    @Hook
    def inside() -> None:
        thread.start()
        assert done.wait(10)

    bench.fake.on_call("cuMemPrefetchAsync", inside)
    bench.allocate(8 * MIB, stream)
    thread.join(10)
    assert done.is_set()
    empty(bench)


_kept: list[HostMemory] = []  # RMM's C++ side holds its callbacks as bare pointers


def over(monkeypatch: pytest.MonkeyPatch, *, adaptor: bool) -> bridge.ManagedBridgeResource:
    """Return a resource over C memory that passes for managed memory."""
    from rmm_managed_bridge.lifecycle import resource

    monkeypatch.setattr(resource, "kind_of_resource", lambda mr: "managed")
    memory = HostMemory()
    _kept.append(memory)
    upstream = rmm.mr.PrefetchResourceAdaptor(memory.resource) if adaptor else memory.resource
    return bridge.ManagedBridgeResource(upstream, device=0)


@pytest.mark.behaviour("A4")
def test_a_preset_decides_where_there_is_one(fake: FakeCuda, hints: FakeHints, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = over(monkeypatch, adaptor=False)
    stream = fake.stream()
    with using_installed("device:4MiB"):
        small, large = (resource.allocate(size, rmm_stream(stream)) for size in (3 * MIB, 4 * MIB))
    assert [(each.low, each.stream == stream.handle) for each in fake.prefetches()] == [(small, False), (large, True)]
    resource.deallocate(small, 3 * MIB, rmm_stream(stream))
    resource.deallocate(large, 4 * MIB, rmm_stream(stream))


@pytest.mark.behaviour("A4")
@pytest.mark.parametrize("adaptor", [False, True])
def test_an_adaptor_of_rmms_decides_where_it_is_below(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, adaptor: bool
) -> None:
    resource = over(monkeypatch, adaptor=adaptor)
    stream = fake.stream()
    ptr = resource.allocate(8 * MIB, rmm_stream(stream))
    ours = [each for each in fake.prefetches() if each.low == ptr and each.size_bytes == 8 * MIB]
    assert len(ours) == (not adaptor)
    resource.deallocate(ptr, 8 * MIB, rmm_stream(stream))
