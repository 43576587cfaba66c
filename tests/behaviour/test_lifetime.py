"""Blocks go back to the pool that gave them, whatever is current by then: L4, L5, L6."""

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import rmm
from helpers.programs import HostMemory, must_succeed, recorded_events, run_python
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import pool as native_pool

MIB = 1 << 20


@pytest.fixture
def rmm_resource_of_device_0() -> Iterator[None]:
    """Put RMM's resource of device 0 back; only the name is kept there, so that works without a GPU too."""
    before = rmm.mr.get_per_device_resource(0)
    yield
    rmm.mr.set_per_device_resource(0, before)


@pytest.mark.behaviour("L4")
@pytest.mark.requires("no_gpu")
def test_a_block_returns_to_its_own_resource_after_another_is_set(rmm_resource_of_device_0: None) -> None:
    memories = [HostMemory(), HostMemory()]
    old, new = (bridge.ManagedBridgeResource(memory.resource) for memory in memories)
    rmm.mr.set_per_device_resource(0, old)
    block = rmm.mr.get_per_device_resource(0).allocate(MIB)
    rmm.mr.set_per_device_resource(0, new)
    other = rmm.mr.get_per_device_resource(0).allocate(MIB)
    assert (old.get_allocated_bytes(), new.get_allocated_bytes()) == (MIB, MIB)

    # Freed through whatever is current now.
    rmm.mr.get_per_device_resource(0).deallocate(block, MIB)
    assert (old.get_allocated_bytes(), new.get_allocated_bytes()) == (0, MIB)
    old.deallocate(other, MIB)
    assert (old.get_allocated_bytes(), new.get_allocated_bytes()) == (0, 0)
    assert not memories[0].wrong_frees
    assert not memories[1].wrong_frees


def _uninstall() -> None:
    bridge.uninstall()


def _reinstall() -> None:
    bridge.uninstall()
    bridge.install("host", frameworks=["numpy"])


def _install_again() -> None:
    bridge.install("host")


def _use_another_numpy_pool() -> None:
    _reinstall()
    assert bridge.owns(np.ones(10))


@pytest.mark.behaviour("L4")
@pytest.mark.parametrize("change", [_uninstall, _reinstall, _install_again, _use_another_numpy_pool])
def test_a_numpy_array_returns_to_its_own_pool(change: Callable[[], None]) -> None:
    bridge.install("host", frameworks=["numpy"])
    number = bridge.stats().pools[-1].number
    array = np.full(MIB, 7, "u1")
    change()
    with recorded_events(100):
        assert array.sum(dtype=int) == 7 * MIB
        ptr = array.ctypes.data
        generation = next(each for each in bridge.stats().pools if each.number == number)
        assert generation.current_bytes == MIB
        del array
        frees = [event for event in bridge.history() if event.action == "deallocate" and event.ptr == ptr]
    bridge.uninstall()
    assert len(frees) == 1
    assert bridge.stats().current_bytes == 0
    assert eventually(lambda: not bridge.stats().pools)


@pytest.mark.behaviour("L4")
def test_an_uninstalled_bridge_serves_no_new_arrays() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        before = np.ones(10)
    after = np.ones(10)
    assert bridge.owns(before)
    assert not bridge.owns(after)
    assert np._core.multiarray.get_handler_name(after) == "default_allocator"  # type: ignore[attr-defined]


@pytest.mark.behaviour("L5")
@pytest.mark.requires("no_gpu")
def test_resources_may_be_switched_while_another_thread_allocates(rmm_resource_of_device_0: None) -> None:
    memories = [HostMemory(), HostMemory()]
    pools = [bridge.ManagedBridgeResource(memory.resource) for memory in memories]
    rmm.mr.set_per_device_resource(0, pools[0])
    done = threading.Event()
    served: set[int] = set()
    failures: list[BaseException] = []

    def allocate() -> None:
        try:
            for _ in range(200_000):
                resource = rmm.mr.get_per_device_resource(0)
                ptr = resource.allocate(64 << 10)
                served.add(id(resource))
                rmm.mr.get_per_device_resource(0).deallocate(ptr, 64 << 10)
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=allocate)
    thread.start()
    turn = 0
    while not done.is_set():
        turn += 1
        rmm.mr.set_per_device_resource(0, pools[turn % 2])
        done.wait(0.0005)
    thread.join()
    assert not failures
    assert served == {id(pool) for pool in pools}
    assert [(pool.get_allocated_bytes(), pool.pool.live_count) for pool in pools] == [(0, 0), (0, 0)]


@pytest.mark.behaviour("L5")
def test_the_bridge_may_be_installed_and_uninstalled_while_another_thread_allocates(host_heap: Any) -> None:
    done = threading.Event()
    failures: list[BaseException] = []
    owned = [0, 0]

    def allocate() -> None:
        try:
            with bridge.numpy_allocator("host"):
                for _ in range(5_000):
                    array = np.ones(64 << 10, "u1")
                    owned[bridge.owns(array)] += 1
                    assert array[-1] == 1
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=allocate)
    thread.start()
    while not done.is_set():
        with bridge.installed("host", frameworks=["numpy"]):
            assert bridge.owns(np.ones(10))
        done.wait(0.0005)
    thread.join()
    assert not failures
    assert owned == [0, 5_000]


@pytest.fixture
def initialize_stub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand in for the part of `rmm.reinitialize` that needs a driver; returns the calls it got."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(rmm.rmm, "_initialize", lambda **arguments: calls.append(arguments))
    return calls


@pytest.mark.behaviour("L6")
@pytest.mark.requires("no_gpu")
def test_reinitialize_names_the_survivors_once_and_starts_a_new_pool(initialize_stub: list[dict[str, Any]]) -> None:
    bridge.install("host", frameworks=["numpy"])
    arrays = []
    for name in ("one", "two", "three"):
        with bridge.tag(name):
            arrays.append(np.full(MIB, 3, "u1"))
    old = bridge.stats().pools[-1].number

    with pytest.warns(bridge.BridgeWarning) as caught:
        rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="1MiB")
    assert len(initialize_stub) == 1
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "3 live blocks, 3.00 MiB" in text
    assert "numpy" in text
    assert f"{__file__}:" in text
    assert caught[0].filename == __file__

    fourth = np.full(MIB, 4, "u1")
    first, second = bridge.stats().pools
    assert (first.number, first.current, first.current_bytes, first.current_count) == (old, False, 3 * MIB, 3)
    assert (second.current, second.current_bytes, second.current_count) == (True, MIB, 1)
    assert all((array == 3).all() for array in arrays)
    assert [bridge.allocation_of(array).tag for array in arrays] == ["one", "two", "three"]  # type: ignore[union-attr]

    del arrays
    assert eventually(lambda: [each.number for each in bridge.stats().pools] == [second.number])
    assert fourth.sum(dtype=int) == 4 * MIB
    bridge.uninstall()


@pytest.mark.behaviour("L6")
@pytest.mark.requires("no_gpu")
def test_reinitialize_without_live_blocks_is_silent(initialize_stub: list[dict[str, Any]]) -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        number = bridge.stats().pools[-1].number
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rmm.reinitialize()
        assert bridge.owns(np.ones(10))
        assert eventually(lambda: [each.number > number for each in bridge.stats().pools] == [True])


@pytest.mark.behaviour("L6")
@pytest.mark.requires("no_gpu")
def test_after_uninstall_reinitialize_is_rmms_own_again(initialize_stub: list[dict[str, Any]]) -> None:
    stub = rmm.rmm._initialize
    with bridge.installed("host", frameworks=["numpy"]):
        assert rmm.rmm._initialize is not stub
    assert rmm.rmm._initialize is stub
    rmm.reinitialize()
    assert len(initialize_stub) == 1
    assert not bridge.status().installed


WRAPPED = """
    import sys
    import rmm.rmm
    import rmm_managed_bridge as bridge
    import numpy as np

    seen = []
    rmm.rmm._initialize = lambda **arguments: seen.append("rmm")
    bridge.install("host", frameworks=["numpy"])
    ours = rmm.rmm._initialize


    def theirs(**arguments):
        seen.append("theirs")
        ours(**arguments) if sys.argv[1] == "wrapped" else seen.append("rmm")


    rmm.rmm._initialize = theirs
    bridge.uninstall()
    rmm.reinitialize()
    assert seen == ["theirs", "rmm"], seen

    bridge.install("host", frameworks=["numpy"])
    before = bridge.stats().pools[-1].number
    rmm.reinitialize()
    assert seen == ["theirs", "rmm"] * 2, seen
    assert [each.number > before for each in bridge.stats().pools] == [True], "not seen by the bridge"
    assert bridge.owns(np.ones(10))
    bridge.uninstall()
"""


@pytest.mark.behaviour("L6")
@pytest.mark.parametrize("how", ["wrapped", "replaced"])
def test_what_others_put_around_or_in_place_of_reinitialize_stays_and_is_seen(how: str) -> None:
    must_succeed(run_python(WRAPPED, how))


def test_trimming_while_a_pool_closes_gives_each_piece_back_once() -> None:
    for _ in range(30):
        heap = native_pool.host_pool()
        heap.deallocate(heap.allocate(1 << 20))
        threads = [threading.Thread(target=call) for call in (heap.trim, heap.retire, heap.trim)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert heap.close()
        assert heap.numbers[0] == 0


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
