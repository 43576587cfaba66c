"""What happens before a `MemoryError`, step by step, on the fake driver: M3."""

import gc
from collections.abc import Callable, Iterator

import pytest
from fake_cuda import FakeCuda
from fake_cuda.pool import MIB, Bench

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import pressure

pytestmark = [pytest.mark.fake_driver, pytest.mark.behaviour("M3")]

CHUNK = 40 * MIB
"""What a block of 40 MiB takes, near the limit: one for itself."""


class Ladder:
    """A pool of at most three chunks, and what an allocation in it does, in order."""

    def __init__(self, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = Bench(fake, limit_bytes=3 * CHUNK, ordering="recorded")
        self.stream = self.bench.owned()
        self.steps: list[str] = []
        self.when_collected: Callable[[], object] = lambda: None
        monkeypatch.setattr(pressure, "collect_garbage", self.collect)

    def collect(self) -> None:
        self.steps.append(f"collect with {self.bench.reserved_bytes // MIB} MiB reserved")
        self.when_collected()

    def waits(self, count: int = 1) -> None:
        """Note the next waits, each with what is reserved then."""

        def note() -> None:
            self.steps.append(f"wait with {self.bench.reserved_bytes // MIB} MiB reserved")
            if count > 1:
                self.waits(count - 1)

        self.bench.fake.on_call("cuEventSynchronize", note)

    def used(self) -> tuple[int, int]:
        """Return a live CPU block of 40 MiB that a device works on, and the operation."""
        ptr = self.bench.allocate(40 * MIB, cpu=True)
        self.bench.order(ptr, self.stream)
        return ptr, self.bench.fake.enqueue(self.stream)


@pytest.fixture
def ladder(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ladder]:
    made = Ladder(fake, monkeypatch)
    yield made
    assert made.bench.close()


def test_free_memory_goes_back_before_anything_is_waited_for(ladder: Ladder) -> None:
    used, operation = ladder.used()
    free = [ladder.bench.allocate(40 * MIB, cpu=True) for _ in range(2)]
    ladder.bench.free(used)
    for ptr in free:
        ladder.bench.free(ptr)
    ladder.bench.allocate(80 * MIB, cpu=True)  # joins what the two have given back
    assert not ladder.bench.fake.done(operation)
    assert ladder.steps == []


def test_a_hopeless_request_trims_waits_collects_once_and_fails(ladder: Ladder) -> None:
    kept = ladder.bench.allocate(40 * MIB, cpu=True)
    free = ladder.bench.allocate(40 * MIB, cpu=True)
    used, operation = ladder.used()
    ladder.bench.free(free)
    ladder.bench.free(used)
    ladder.waits()
    with pytest.raises(MemoryError):
        ladder.bench.allocate(500 * MIB, cpu=True)
    assert ladder.steps == ["wait with 80 MiB reserved", "collect with 40 MiB reserved"]
    assert ladder.bench.fake.done(operation)
    assert ladder.bench.reserved_bytes == CHUNK, "all but what is live has gone back"
    assert ladder.bench.live.keys() == {kept}


def test_what_the_collection_frees_is_waited_for_trimmed_and_served_by_one_retry(ladder: Ladder) -> None:
    kept = ladder.bench.allocate(40 * MIB, cpu=True)
    used, operation = ladder.used()
    ladder.when_collected = lambda: ladder.bench.free(used)
    ladder.waits()
    ladder.bench.allocate(80 * MIB, cpu=True)
    assert ladder.steps == ["collect with 80 MiB reserved", "wait with 80 MiB reserved"]
    assert ladder.bench.fake.done(operation)
    assert ladder.bench.reserved_bytes == CHUNK + 80 * MIB, "what was waited for went back first"
    assert kept in ladder.bench.live


def test_a_collection_that_frees_too_little_is_not_repeated(ladder: Ladder) -> None:
    used, _ = ladder.used()
    ladder.when_collected = lambda: ladder.bench.free(used) if used in ladder.bench.live else None
    with pytest.raises(MemoryError):
        ladder.bench.allocate(500 * MIB, cpu=True)
    assert ladder.steps == ["collect with 40 MiB reserved"]
    assert ladder.bench.reserved_bytes == 0


def test_the_callback_comes_last_and_each_yes_is_one_more_try(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    used, _ = ladder.used()
    kept = ladder.bench.allocate(40 * MIB, cpu=True)

    def make_room(size_bytes: int, attempt: int) -> bool:
        ladder.steps.append(f"callback {attempt} for {size_bytes // MIB} MiB")
        if attempt == 2:
            ladder.bench.free(used)
        return True

    monkeypatch.setattr(pressure, "on_oom", make_room)
    ladder.waits()
    ladder.bench.allocate(80 * MIB, cpu=True)
    assert ladder.steps == [
        "collect with 80 MiB reserved",
        "callback 1 for 80 MiB",
        "callback 2 for 80 MiB",
        "wait with 80 MiB reserved",
    ]
    assert kept in ladder.bench.live


def test_garbage_that_holds_a_device_block_makes_room(ladder: Ladder) -> None:
    """The real collector, with nothing put in its place but a note."""

    class Cycle:
        def __init__(self) -> None:
            self.ptr, self.me = ladder.bench.allocate(96 * MIB, ladder.stream), self

        def __del__(self) -> None:
            ladder.bench.free(self.ptr, ladder.stream)

    ladder.when_collected = gc.collect
    gc.collect()
    gc.disable()
    try:
        Cycle()
        operation = ladder.bench.fake.enqueue(ladder.stream)
        ptr = ladder.bench.allocate(96 * MIB, ladder.stream)
    finally:
        gc.enable()
    assert ladder.steps == ["collect with 96 MiB reserved"]
    assert not ladder.bench.fake.done(operation), "the same stream need not wait"
    ladder.bench.free(ptr, ladder.stream)


def test_inside_numpys_functions_nothing_is_collected(ladder: Ladder) -> None:
    import numpy as np

    with bridge.numpy_allocator("managed"), pytest.raises(MemoryError):
        np.empty(500 * MIB, "u1")
    assert ladder.steps == []
