"""CuPy's own calls about its memory pool tell of the bridge while CuPy is hooked."""

import pytest
from helpers.programs import run_on_gpu


@pytest.mark.requires("gpu", "cupy")
@pytest.mark.behaviour("U1")
def test_the_default_pool_counts_what_the_bridge_holds() -> None:
    run_on_gpu("""
        import cupy
        import rmm_managed_bridge as bridge

        own = cupy.get_default_memory_pool()
        bridge.install("managed", initial_pool_size="256MiB")
        pool = cupy.get_default_memory_pool()
        assert isinstance(pool, cupy.cuda.MemoryPool)
        before = pool.used_bytes()
        x = cupy.ones(8 << 20, "u1")
        assert pool.used_bytes() - before == 8 << 20
        assert pool.total_bytes() >= 8 << 20
        del x
        pool.free_all_blocks()
        assert pool.used_bytes() == before
        pool.set_limit(size=1 << 30)
        assert own.get_limit() == 1 << 30
        bridge.uninstall()
        assert cupy.get_default_memory_pool() is own
    """)
