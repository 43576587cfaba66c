"""Nobody is refused memory that is there, but in a thread's hand: between two lists, while another one looks for it."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cuda import FakeCuda, Stream, cuda_include
from fake_cuda.pool import MIB, Bench
from helpers.native_sources import compile_program, one_unit, run_program

pytestmark = [pytest.mark.fake_driver, pytest.mark.behaviour("M3")]


class Other:
    """A thread that wants memory from inside of one of our driver calls on."""

    def __init__(self, bench: Bench, size_bytes: int, stream: Stream | None = None) -> None:
        self.bench, self.size_bytes, self.stream = bench, size_bytes, stream
        self.outcome: list[int | BaseException] = []
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            self.outcome.append(self.bench.allocate(self.size_bytes, self.stream, cpu=self.stream is None))
        except BaseException as error:
            self.outcome.append(error)

    def begin(self) -> None:
        """Give it time to be refused, though not to wait for what we have in hand."""
        self.thread.start()
        self.thread.join(0.15)

    def inside(self, function: str, act: Callable[[], object]) -> None:
        """Begin in the next call of the function by `act`."""
        self.bench.fake.on_call(function, self.begin)
        act()
        assert self.thread.ident is not None, f"{function} was not called"
        self.thread.join()
        assert isinstance(self.outcome[0], int), self.outcome


def test_cpu_blocks_on_their_way_into_quarantine(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=80 * MIB)
    bench.owned()  # so that frees of CPU blocks are deferred
    ptr = bench.allocate(80 * MIB, cpu=True)
    Other(bench, 40 * MIB).inside("cuEventRecord", lambda: bench.free(ptr))
    assert bench.close()


def test_blocks_of_another_stream(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=64 * MIB)
    first, second = bench.owned(), bench.owned()
    for ptr in [bench.allocate(32 * MIB, first) for _ in range(2)]:
        bench.free(ptr, first)
    Other(bench, 32 * MIB, first).inside("cuEventRecord", lambda: bench.allocate(32 * MIB, second))
    assert bench.close()


def test_blocks_of_a_stream_that_is_let_go(fake: FakeCuda) -> None:
    bench = Bench(fake, limit_bytes=64 * MIB)
    stream = bench.owned()
    bench.free(bench.allocate(64 * MIB, stream), stream)

    def let_go() -> None:
        del bench.owners[stream]
        bench.heap.drop_unused_streams()

    Other(bench, 64 * MIB, bench.owned()).inside("cuEventRecord", let_go)
    assert bench.close()


@pytest.mark.skipif(cuda_include() is None, reason="no cuda.h; pip install nvidia-cuda-runtime")
def test_what_upstream_is_asked_for_or_has_back(tmp_path: Path) -> None:
    program = compile_program(tmp_path / "in_hand", [Path(__file__).with_name("in_hand.cpp"), one_unit(tmp_path)])
    run_program(program)
