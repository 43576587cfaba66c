"""How long an allocation waits for freed blocks: as long as anything that they wait for ends, and then a while."""

import threading

import pytest
from fake_cuda import FakeCuda
from fake_cuda.pool import MIB, Bench

from rmm_managed_bridge._native import numpy_handler

pytestmark = pytest.mark.fake_driver


def full(fake: FakeCuda, wait_timeout_ms: int) -> tuple[Bench, list[int], list[int]]:
    """Return a full pool whose blocks are freed behind one unfinished operation each, on a stream each."""
    fake.clear()
    fake.hang()
    bench = Bench(fake, limit_bytes=64 * MIB, wait_timeout_ms=wait_timeout_ms, ordering="recorded")
    operations, blocks = [], []
    for _ in range(3):
        stream = bench.owned()
        ptr = bench.allocate(20 * MIB, cpu=True)
        bench.expose(ptr, stream)
        operations.append(fake.enqueue(stream))
        blocks.append(ptr)
    for ptr in blocks:
        bench.free(ptr)
    return bench, operations, blocks


def test_work_that_does_not_end_is_an_error_that_names_stream_and_block(fake: FakeCuda) -> None:
    bench, _, blocks = full(fake, 20)
    oldest = next(iter(bench.owners))
    with pytest.raises(MemoryError) as error:
        bench.allocate(40 * MIB, cpu=True)
    assert f"stream {oldest.handle:#x}" in str(error.value)
    assert f"block at {blocks[0]:#x}" in str(error.value)
    assert "wait_timeout" in str(error.value)
    assert bench.close()


def test_numpys_error_names_them_too(fake: FakeCuda) -> None:
    bench, _, blocks = full(fake, 20)
    handler = numpy_handler.NumpyHandler()
    handler.use(bench.heap)
    assert handler.malloc(40 * MIB) == 0
    refused = numpy_handler.take_refusal()
    assert refused is not None
    assert f"{blocks[0]:#x}" in str(refused[1])
    handler.use(None)
    assert bench.close()


def test_the_wait_goes_on_while_other_work_ends(fake: FakeCuda) -> None:
    """The three end one after the other, the oldest last, each within the time and all of them beyond it."""
    bench, operations, _ = full(fake, 1000)
    begun, over = threading.Event(), threading.Event()

    def device() -> None:
        begun.wait(10)
        for operation in reversed(operations):
            over.wait(0.4)
            fake.finish(operation)

    thread = threading.Thread(target=device)
    thread.start()
    fake.on_call("cuEventQuery", begun.set)
    ptr = bench.allocate(60 * MIB, cpu=True)  # needs all three
    thread.join()
    bench.free(ptr)
    assert bench.close()


def test_a_device_that_fails_is_not_waited_for(fake: FakeCuda) -> None:
    bench, _, _ = full(fake, 60_000)

    def fails() -> None:
        fake.fail("cuEventQuery", skip=0)
        fake.on_call("cuEventQuery", fails)

    fails()
    with pytest.raises(MemoryError) as error:
        bench.allocate(40 * MIB, cpu=True)
    assert "wait_timeout" not in str(error.value)
    fake.clear()
    assert bench.close()
