"""DLPack exports on the fake driver: which stream waits for what, and what a block waits for afterwards: I1."""

import gc
from typing import Any

import pytest
from fake_cuda import LEGACY, FakeCuda, Stream
from fake_cuda.pool import MIB, Bench

import rmm_managed_bridge as bridge
from rmm_managed_bridge.frameworks import registry

pytestmark = [pytest.mark.fake_driver, pytest.mark.behaviour("I1")]


class Framework:
    """A library with a current stream, as CuPy has one."""

    class StreamObject:
        def __init__(self, stream: Stream) -> None:
            self.ptr = stream.handle

    def __init__(self, stream: Stream) -> None:
        self.use(stream)

    def use(self, stream: Stream) -> None:
        self.current = self.StreamObject(stream)


@pytest.fixture
def library(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Framework:
    library = Framework(fake.stream())
    current = registry.CurrentStream(lambda device: library.current.ptr, lambda device: library.current)
    monkeypatch.setattr(registry, "current_streams", lambda: [current])
    return library


class Interface:
    def __init__(self, ptr: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {"version": 3, "shape": (size_bytes,), "typestr": "|u1", "data": (ptr, False)}


def test_the_consumers_stream_waits_and_the_cpu_does_not(fake: FakeCuda, bench: Bench, library: Framework) -> None:
    maker = bench.owned()
    ptr = bench.allocate(MIB, maker)
    work = fake.enqueue(maker)
    consumer = fake.stream()
    library.use(consumer)
    export = bridge.as_dlpack(Interface(ptr, MIB))
    assert export.__dlpack_device__() == (13, 0)
    capsule = export.__dlpack__(stream=consumer.handle, max_version=(1, 0))
    assert not fake.done(work) and fake.ordered(work, consumer)
    assert fake.calls("cuEventSynchronize") == 0
    # The consumer works on another stream of its own when it lets go: the block waits for both.
    later = fake.stream()
    library.use(later)
    uses = [fake.enqueue(consumer), fake.enqueue(later)]
    del capsule, export
    gc.collect()
    bench.free(ptr)
    again = bench.allocate(MIB, maker)
    assert again != ptr or all(fake.ordered(use, maker) for use in uses)
    fake.finish(uses[0])
    taken = bench.allocate(MIB, cpu=True)
    assert taken != ptr or fake.done(uses[1])


@pytest.mark.parametrize("stream", [None, "unknown"])
def test_a_consumer_that_is_not_known_gets_finished_work(
    fake: FakeCuda, bench: Bench, library: Framework, stream: str | None
) -> None:
    maker = bench.owned()
    ptr = bench.allocate(MIB, maker)
    work = fake.enqueue(maker)
    handle = None if stream is None else fake.stream().handle
    bridge.as_dlpack(Interface(ptr, MIB)).__dlpack__(stream=handle, max_version=(1, 0))
    assert fake.done(work)


def test_the_cpu_waits_whatever_stream_is_named(fake: FakeCuda, bench: Bench, library: Framework) -> None:
    maker = bench.owned()
    ptr = bench.allocate(MIB, maker)
    work = fake.enqueue(maker)
    bridge.as_dlpack(Interface(ptr, MIB)).__dlpack__(stream=library.current.ptr, dl_device=(1, 0))
    assert fake.done(work)


def test_no_wait_where_the_consumer_wants_none(fake: FakeCuda, bench: Bench, library: Framework) -> None:
    maker = bench.owned()
    ptr = bench.allocate(MIB, maker)
    work = fake.enqueue(maker)
    bridge.as_dlpack(Interface(ptr, MIB)).__dlpack__(stream=-1)
    assert not fake.done(work)


def test_stream_1_is_the_legacy_stream(fake: FakeCuda, bench: Bench, library: Framework) -> None:
    maker = bench.owned()
    ptr = bench.allocate(MIB, maker)
    work = fake.enqueue(maker)
    library.use(fake.ambient(LEGACY))
    library.current.ptr = LEGACY
    bridge.as_dlpack(Interface(ptr, MIB)).__dlpack__(stream=1)
    assert not fake.done(work) and fake.ordered(work, fake.ambient(LEGACY))


@pytest.mark.behaviour("D4")
def test_a_cpu_consumer_waits_for_a_device_that_shares_no_pages(fake: FakeCuda, library: Framework) -> None:
    exclusive = Bench(fake, concurrent=False)
    ptr = exclusive.allocate(MIB)
    work: Any = fake.enqueue(exclusive.borrowed())
    bridge.as_dlpack(Interface(ptr, MIB)).__dlpack__(dl_device=(1, 0))
    assert fake.done(work) and fake.calls("cuCtxSynchronize") == 1
    assert exclusive.close()
