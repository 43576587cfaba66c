"""What forks cost: children share one copy, within a limit, and only where Python forks: L8."""

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_cuda.pool import KIB, MIB, Bench
from helpers.forked import in_forked_child
from helpers.managed_numpy import Managed, counted
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge.lifecycle import forks

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def managed(bench: Bench) -> Iterator[Managed]:
    with bridge.installed("host", frameworks=["numpy"]):
        yield Managed(bench)


def is_arange(array: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
    assert (array == np.arange(len(array))).all()


@pytest.mark.behaviour("L8")
def test_eight_children_share_one_copy(managed: Managed) -> None:
    array = managed.arange(MIB)
    reading, writing = os.pipe()
    children = []
    with counted() as risen:
        for _ in range(8):
            child = os.fork()
            if child == 0:
                os.read(reading, 1)  # until all are there
                os._exit(0 if (array == np.arange(MIB)).all() else 1)
            children.append(child)
        os.write(writing, b"x" * 8)
        assert {os.waitpid(child, 0)[1] for child in children} == {0}
        count, given, copied = risen()
    assert count == 8 and given >= 8 * array.nbytes
    assert array.nbytes <= copied <= array.nbytes + 16 * PAGE
    os.close(reading)
    os.close(writing)


@pytest.mark.behaviour("L8")
def test_the_next_fork_copies_pages_that_changed(managed: Managed) -> None:
    array = managed.arange(MIB)
    assert in_forked_child(lambda: is_arange(array)) == ""
    with counted() as risen:
        array[[1000, 1001, 500_000]] = [-1, -2, -3]
        more = [managed.arange(4 * KIB)]

        def action() -> None:
            assert array[[1000, 1001, 500_000]].tolist() == [-1, -2, -3]
            array[[1000, 1001, 500_000]] = [1000, 1001, 500_000]
            is_arange(array)
            is_arange(more[0])

        assert in_forked_child(action) == ""
        assert 2 * PAGE < risen()[2] <= 2 * PAGE + more[0].nbytes + PAGE
    array[[1000, 1001, 500_000]] = [1000, 1001, 500_000]
    more.clear()
    assert in_forked_child(lambda: is_arange(array)) == ""


@pytest.mark.behaviour("L8")
def test_what_is_gone_is_not_kept_and_its_place_is_taken_by_the_next(managed: Managed) -> None:
    arrays = [managed.full(MIB, number) for number in range(4)]
    for turn in range(6):
        arrays[turn % 4] = managed.full(MIB // (1 + turn % 3), 10 + turn)
        expected = [int(each[-1]) for each in arrays]

        def action(expected: list[int] = expected) -> None:
            assert all((each == number).all() for each, number in zip(arrays, expected, strict=True))

        assert in_forked_child(action) == ""


@pytest.mark.behaviour("L8")
def test_the_copies_go_after_a_while(managed: Managed, monkeypatch: pytest.MonkeyPatch) -> None:
    array = managed.arange(MIB)
    monkeypatch.setattr(forks, "KEEP_MS", 1)

    def copies_all() -> bool:
        with counted() as risen:
            assert in_forked_child(lambda: is_arange(array)) == ""
            return risen()[2] >= array.nbytes

    assert copies_all()
    assert eventually(copies_all)


@pytest.mark.behaviour("L8")
def test_beyond_the_limit_nothing_is_copied_and_one_warning_says_both_cures(managed: Managed) -> None:
    array = managed.arange(MIB)
    limit = array.nbytes - 1
    with managed.forks("copy", limit), counted() as risen:
        with pytest.warns(bridge.BridgeWarning) as said:
            assert in_forked_child(lambda: None) == ""
        assert in_forked_child(lambda: None) == ""
        assert risen() == (0, 0, 0)
    (text,) = (str(each.message) for each in said if issubclass(each.category, bridge.BridgeWarning))
    assert "1 arrays (8.00 MiB)" in text and "fork_limit='8MiB'" in text and "'spawn'" in text
    with managed.forks("copy", array.nbytes):
        assert in_forked_child(lambda: is_arange(array)) == ""


@pytest.mark.behaviour("L8")
def test_a_fork_is_refused_where_that_was_asked_for(managed: Managed) -> None:
    array = managed.arange(MIB)
    with managed.forks("refuse"):
        with pytest.raises(bridge.BridgeError, match=r"1 NumPy arrays .8.00 MiB"):
            os.fork()
        with pytest.raises(bridge.BridgeError, match="refuse"):
            multiprocessing.get_context("fork").Process(target=int).start()
        subprocess.run([sys.executable, "-c", ""], check=True)
        del array
        assert in_forked_child(lambda: None) == ""


@pytest.mark.behaviour("L8")
def test_a_program_that_is_started_pays_nothing(managed: Managed) -> None:
    array = managed.arange(MIB)
    with counted() as risen:
        subprocess.run([sys.executable, "-c", ""], check=True)
        subprocess.run([sys.executable, "-c", ""], check=True, preexec_fn=os.getpid)
        assert risen() == (0, 0, 0)
        assert in_forked_child(lambda: is_arange(array)) == ""
        assert risen()[0] == 1


@pytest.mark.behaviour("L8")
def test_host_arrays_cost_nothing(managed: Managed) -> None:
    array = np.arange(MIB)
    with counted() as risen:
        assert in_forked_child(lambda: is_arange(array)) == ""
        assert risen() == (0, 0, 0)


@pytest.mark.behaviour("L8")
def test_what_forks_copied_is_in_stats(managed: Managed) -> None:
    array = managed.arange(MIB)
    before = bridge.stats()

    def action() -> None:
        stats = bridge.stats()
        assert (stats.fork_count, stats.fork_bytes, stats.fork_copied_bytes, stats.fork_seconds) == (0, 0, 0, 0)

    assert in_forked_child(action) == ""
    after = bridge.stats()
    assert after.fork_count == before.fork_count + 1 and after.fork_seconds > before.fork_seconds
    assert after.fork_bytes - before.fork_bytes >= after.fork_copied_bytes - before.fork_copied_bytes >= array.nbytes


@pytest.mark.behaviour("L9")
def test_forks_of_two_threads_while_others_allocate_and_give_back(managed: Managed) -> None:
    kept = managed.arange(100_000)
    stop, wrong = threading.Event(), []

    def allocate() -> None:
        while not stop.is_set():
            held = [managed.arange(length) for length in (10, 1000, 300_000)]
            del held
            managed.bench.heap.trim()

    def fork() -> None:
        for _ in range(10):
            mine = managed.arange(50_000)
            said = in_forked_child(lambda mine=mine: (is_arange(kept), is_arange(mine)))
            if said:
                wrong.append(said)

    allocating = [threading.Thread(target=allocate) for _ in range(2)]
    forking = [threading.Thread(target=fork) for _ in range(2)]
    for thread in allocating + forking:
        thread.start()
    for thread in forking:
        thread.join()
    stop.set()
    for thread in allocating:
        thread.join()
    assert wrong == []


def _sum_of(_: int) -> int:
    return int(_inherited[0].sum())


_inherited: "list[np.ndarray[tuple[int], np.dtype[np.int64]]]" = []


@pytest.mark.behaviour("L8")
def test_workers_of_multiprocessing_read_what_was_there(managed: Managed) -> None:
    _inherited.append(managed.arange(MIB))
    try:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(_sum_of, range(4)) == [MIB * (MIB - 1) // 2] * 4
    finally:
        _inherited.clear()


@pytest.mark.behaviour("L8")
def test_a_child_has_nothing_of_the_copies_twice(managed: Managed) -> None:
    """They are moved: what the parent keeps is not in the child."""
    array = managed.arange(8 * MIB)

    def mapped_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE

    before = mapped_bytes()

    def action() -> None:
        is_arange(array[:1])
        assert mapped_bytes() <= before + array.nbytes // 4  # the array's place is mapped anew, and counted already

    assert in_forked_child(action) == ""
