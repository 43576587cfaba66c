"""Nothing piles up: what a pool keeps does not grow with what it has done, nor with who looks at it."""

import pytest
from fake_cuda import FakeCuda
from fake_cuda.pool import KIB, MIB, Bench, Owner
from helpers.programs import run_python

pytestmark = pytest.mark.fake_driver


@pytest.mark.parametrize("every", [1, 10, 100])
def test_reading_figures_does_not_put_off_what_waits(bench: Bench, every: int) -> None:
    bench.owned()  # so that what the CPU frees is deferred
    most = 0
    for turn in range(5000):
        bench.free(bench.allocate(4 * KIB, cpu=True))
        if turn % every == 0:
            most = max(most, bench.quarantined_bytes)
    assert most <= 2 * MIB, "one block of 4 KiB is live at a time"


def test_an_allocation_does_not_ask_about_each_block_that_was_freed_before(bench: Bench, fake: FakeCuda) -> None:
    streams = [bench.owned() for _ in range(4)]
    for stream in streams:
        fake.enqueue(stream)
    questions = []
    for count in (100, 5000):
        for _ in range(count):
            ptr = bench.allocate(256, cpu=True)
            bench.expose(ptr, streams[0])
            bench.free(ptr)
        before = fake.calls("cuEventQuery")
        bench.allocate(5 * MIB, cpu=True)
        questions.append(fake.calls("cuEventQuery") - before)
    assert questions[1] <= questions[0] + len(streams)


def test_streams_that_are_gone_leave_nothing(bench: Bench, fake: FakeCuda) -> None:
    def make_and_drop() -> None:
        stream, owner = bench.borrowed(), Owner()
        bench.heap.hold(stream.handle, owner)
        bench.free(bench.allocate(KIB, stream), stream)
        fake.finish_all()
        del owner
        bench.heap.drop_unused_streams()
        fake.destroy(stream)

    def left() -> tuple[int, int]:
        return fake.calls("cuEventCreate") - fake.calls("cuEventDestroy"), int(bench.heap.numbers[4])

    make_and_drop()
    after_one = left()
    for _ in range(2000):
        make_and_drop()
    assert left() == after_one


def test_streams_whose_handle_never_comes_again_leave_what_a_slab_has_room_for(bench: Bench, fake: FakeCuda) -> None:
    """Nobody holds these: the pool is told of each by its bare handle, once."""

    def use_once() -> None:
        stream = bench.borrowed()
        bench.free(bench.allocate(KIB, stream), stream)
        fake.finish_all()
        fake.destroy(stream)

    def left() -> tuple[int, int]:
        return fake.calls("cuEventCreate") - fake.calls("cuEventDestroy"), int(bench.heap.numbers[4])

    for _ in range(1000):
        use_once()
    after_some = left()
    for _ in range(3000):
        use_once()
    assert left() == after_some


def test_pools_that_have_ended_cost_little() -> None:
    done = run_python(
        """
        from rmm_managed_bridge._native import pool as native_pool

        def resident_bytes():
            with open("/proc/self/statm") as file:
                return 4096 * int(file.read().split()[1])

        def use_one():
            pool = native_pool.host_pool()
            for size in (100, 5000, 1 << 22):
                pool.deallocate(pool.allocate(size, cpu=True), size)
            assert pool.retire()

        for _ in range(50):
            use_one()
        before = resident_bytes()
        for _ in range(500):
            use_one()
        print((resident_bytes() - before) // 500)
        """
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50 << 10
