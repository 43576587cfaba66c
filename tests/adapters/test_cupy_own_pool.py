"""CuPy's own calls about its memory pool, on a stub of CuPy: they tell of the bridge while CuPy is hooked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import stub_cupy, stub_pools

import rmm_managed_bridge as bridge

MIB = 1 << 20

pytestmark = pytest.mark.behaviour("U1")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the stub of CuPy, which `install` can hook."""
    stub_pools.put_in_place(monkeypatch)
    return stub_cupy.put_in_place(monkeypatch)


def test_the_default_pool_counts_what_the_bridge_holds(cupy: Any) -> None:
    with bridge.installed(frameworks=["numpy", "cupy"]):
        pool = cupy.get_default_memory_pool()
        assert pool.used_bytes() == 0
        block = cupy.alloc(8 * MIB)
        assert pool.used_bytes() == 8 * MIB
        assert pool.total_bytes() == bridge.stats().reserved_bytes >= 8 * MIB
        assert pool.free_bytes() == pool.total_bytes() - 8 * MIB
        del block
        assert pool.used_bytes() == 0
        reserved = pool.total_bytes()
        pool.free_all_blocks()
        assert pool.total_bytes() < reserved
        assert cupy.own_pool.freed == 1, "what it held before goes back too"


def test_a_limit_of_the_default_pool_is_told_where_it_belongs(cupy: Any) -> None:
    with bridge.installed(frameworks=["cupy"]):
        pool = cupy.get_default_memory_pool()
        with pytest.warns(bridge.BridgeWarning, match=r"use install\(maximum_pool_size=\.\.\.\)") as said:
            pool.set_limit(size=MIB)
        assert [Path(each.filename).name for each in said] == [Path(__file__).name]
        assert pool.get_limit() == cupy.own_pool.limit == MIB, "it holds again after uninstall"


def test_it_passes_for_cupys_pool_and_ends_with_the_bridge(cupy: Any) -> None:
    with bridge.installed(frameworks=["cupy"]):
        pool = cupy.get_default_memory_pool()
        assert isinstance(pool, stub_cupy.MemoryPool)
        assert pool is cupy.get_default_memory_pool()
    assert cupy.get_default_memory_pool() is cupy.own_pool
    assert pool.used_bytes() == 0


def test_a_function_that_somebody_else_put_there_stays(cupy: Any) -> None:
    with bridge.installed(frameworks=["cupy"]):
        other = cupy.get_default_memory_pool = lambda: cupy.own_pool
    assert cupy.get_default_memory_pool is other
