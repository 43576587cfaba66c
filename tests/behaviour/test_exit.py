"""How programs end, whatever they leave behind: L1, L2, L3."""

import itertools

import pytest
from helpers.programs import must_succeed, run_python

LEAVES_EVERYTHING = """
    import numpy as np
    import rmm_managed_bridge as bridge

    bridge.install()
    kept = [np.ones(1 << 20, "u1") for _ in range(10)]


    class Node:
        pass


    node = Node()
    node.itself = node
    node.arrays = [np.ones(1 << 20, "u1") for _ in range(10)]
    del node


    class Holder:
        def __init__(self):
            self.array = np.ones(1 << 20, "u1")

        def __del__(self):
            del self.array


    holder = Holder()
    assert bridge.stats().current_bytes == 21 << 20
"""


@pytest.mark.behaviour("L1")
def test_fifty_programs_that_clean_up_nothing_end_silently() -> None:
    for run in range(50):
        result = run_python(LEAVES_EVERYTHING, options=("-W", "error", "-X", "dev") if run == 0 else ("-W", "error"))
        must_succeed(result)


@pytest.mark.behaviour("L1")
def test_arrays_freed_by_other_exit_handlers_and_threads_end_silently() -> None:
    must_succeed(
        run_python(
            """
            import atexit, threading, time
            import numpy as np
            import rmm_managed_bridge as bridge

            bridge.install()
            kept = {"array": np.ones(1 << 20, "u1")}
            atexit.register(kept.clear)
            other = np.ones(1 << 20, "u1")

            def allocate_for_ever():
                with bridge.numpy_allocator():
                    while True:
                        np.ones(1 << 16, "u1")

            threading.Thread(target=allocate_for_ever, daemon=True).start()
            time.sleep(0.05)
            """
        )
    )


@pytest.mark.behaviour("L1")
def test_a_resource_and_its_blocks_may_be_left_to_the_exit() -> None:
    must_succeed(
        run_python(
            """
            import rmm_managed_bridge as bridge
            from helpers.programs import HostMemory

            memory = HostMemory()
            resource = bridge.ManagedBridgeResource(memory.resource)
            kept = [resource.allocate(1 << 20) for _ in range(10)]
            cycle = [resource, memory]
            cycle.append(cycle)
            """
        )
    )


MODULES = {
    "numpy": "import numpy; kept.append(numpy.ones(1 << 20, 'u1'))",
    "rmm": "import rmm; kept.append(rmm.mr.CallbackMemoryResource(lambda *_: 0, lambda *_: None))",
    "bridge": (
        "import rmm_managed_bridge as bridge; bridge.install('host'); "
        "import numpy; kept.append(numpy.ones(1 << 20, 'u1'))"
    ),
    "warp": "import warp; warp.config.quiet = True; kept.append(warp.zeros(1 << 18, dtype=float, device='cpu'))",
}


@pytest.mark.behaviour("L2")
@pytest.mark.requires("warp")
@pytest.mark.parametrize("order", list(itertools.permutations(MODULES)), ids="-".join)
def test_every_import_order_ends_silently(order: tuple[str, ...]) -> None:
    must_succeed(run_python("\n".join(["kept = []", *(MODULES[name] for name in order)])))


@pytest.mark.behaviour("L2")
@pytest.mark.requires("cupy", "warp")
@pytest.mark.parametrize("cupy_first", [True, False])
def test_cupy_may_be_imported_first_or_last_without_a_gpu(cupy_first: bool) -> None:
    others = [MODULES[name] for name in ("rmm", "numpy", "bridge", "warp")]
    lines = ["import cupy", *others] if cupy_first else [*others, "import cupy"]
    # CuPy itself warns of things that are not our business, so warnings are no errors here.
    must_succeed(run_python("\n".join(["kept = []", *lines]), options=("-W", "ignore")))


@pytest.mark.behaviour("L3")
def test_an_array_outlives_the_bridge_its_modules_and_their_return() -> None:
    out = must_succeed(
        run_python(
            """
            import gc, sys
            import numpy as np
            import rmm_managed_bridge as bridge

            with bridge.installed("host"):
                array = np.arange(1 << 17, dtype=np.float64)
            assert bridge.stats().current_bytes == 1 << 20
            del bridge
            for name in [name for name in sys.modules if name.partition(".")[0] == "rmm_managed_bridge"]:
                del sys.modules[name]
            gc.collect()
            assert array.sum() == (1 << 17) * ((1 << 17) - 1) / 2
            del array

            import time
            import rmm_managed_bridge as again

            for _ in range(1000):  # a thread of the bridge's own gives the memory back
                if not again.stats().pools:
                    break
                time.sleep(0.01)
            stats = again.stats()
            print(stats.current_count, stats.current_bytes, stats.reserved_bytes, stats.pools)
            with again.installed("host"):
                assert again.owns(np.ones(100))
            """
        )
    )
    assert out == "0 0 0 ()\n"


@pytest.mark.behaviour("L3")
@pytest.mark.parametrize("first", ["resource", "block", "cycle"])
def test_a_pool_is_released_after_its_last_block_in_any_order(first: str) -> None:
    out = must_succeed(
        run_python(
            """
            import gc, sys, time
            import rmm_managed_bridge as bridge
            from helpers.programs import HostMemory


            class Block:
                def __init__(self, resource):
                    self.ptr = resource.allocate(1 << 20)
                    # A free needs no resource: a block is known by its address.
                    self.free = bridge._native.pool.any_pool().deallocate

                def __del__(self):
                    self.free(self.ptr, 1 << 20)


            import rmm_managed_bridge._native.pool

            memory = HostMemory()
            resource = bridge.ManagedBridgeResource(memory.resource)
            block = Block(resource)
            assert memory.live_bytes > 0
            if sys.argv[1] == "resource":
                del resource
                gc.collect()
                assert memory.live_bytes > 0
                del block
            elif sys.argv[1] == "block":
                del block
                assert memory.live_bytes > 0
                del resource
            else:
                cycle = [resource, block]
                cycle.append(cycle)
                del resource, block, cycle
            gc.collect()
            for _ in range(1000):  # a thread of the bridge's own gives the memory back
                if not bridge.stats().pools:
                    break
                time.sleep(0.01)
            print(memory.live_bytes, memory.wrong_frees, bridge.stats().pools)
            """,
            first,
        )
    )
    assert out == "0 [] ()\n"
