"""Old spellings: each still works for one release, and says what to write at the line that wrote it."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from helpers.programs import HostMemory

import rmm_managed_bridge as bridge
from rmm_managed_bridge.config import read_config
from rmm_managed_bridge.records import Stats, Status


@contextmanager
def told_to_write(new: str) -> Iterator[None]:
    """Expect one warning or more, all of the same kind and of lines of this file."""
    with pytest.warns(FutureWarning, match=f"write {new}$") as seen:
        yield
    assert {(each.category, each.filename) for each in seen} == {(FutureWarning, __file__)}


def test_ownership_is_memory_owner() -> None:
    array = np.frombuffer(bytearray(80))
    with told_to_write("memory_owner"):
        assert bridge.ownership(array) == bridge.memory_owner(array) == "wrapped"
    with told_to_write("memory_owner"):
        from rmm_managed_bridge import ownership
    assert ownership is bridge.memory_owner
    assert "ownership" not in dir(bridge)


@pytest.mark.parametrize("ask", [bridge.stats, bridge.status])
def test_generations_are_pools(ask: Callable[[], Stats | Status]) -> None:
    record = ask()
    with told_to_write("pools"):
        assert record.generations is record.pools
    assert "generations" not in repr(record)


@pytest.mark.parametrize(("old", "new"), [("appeared", "added"), ("vanished", "freed")])
def test_what_appeared_was_added_and_what_vanished_was_freed(old: str, new: str) -> None:
    difference = bridge.snapshot().compare(bridge.snapshot())
    with told_to_write(new):
        assert getattr(difference, old) is getattr(difference, new)
    assert old not in str(difference)
    assert old not in repr(difference)


def test_pool_off_is_pool_debug() -> None:
    with told_to_write('pool="debug"'), bridge.installed("host", frameworks=["numpy"], pool="off") as installed:
        assert installed.config.pool == "debug"
        assert (np.empty(1000, "u1") == 0xCD).all(), "not the pattern of debug mode"
    with told_to_write('pool="debug"'):
        assert bridge.install("host", frameworks=[], pool="off") is bridge.install(pool="debug")
    bridge.uninstall()


@pytest.mark.requires("no_gpu")
def test_pool_off_of_a_resource_is_pool_debug() -> None:
    memory = HostMemory()
    with told_to_write('pool="debug"'):
        resource = bridge.ManagedBridgeResource(memory.resource, pool="off")
    ptr = resource.allocate(1000)
    assert ctypes.string_at(ptr, 1000) == b"\xcd" * 1000, "not the pattern of debug mode"
    resource.deallocate(ptr, 1000)


def test_pool_off_in_the_environment_is_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMM_BRIDGE_POOL", "off")
    with told_to_write('RMM_BRIDGE_POOL="debug"'), bridge.installed("host", frameworks=[]) as installed:
        assert installed.config.pool == "debug"
    with pytest.raises(bridge.ConfigError, match="'on', 'debug'"):
        read_config(pool="of")
