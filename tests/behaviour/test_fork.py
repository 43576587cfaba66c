"""Forked and spawned children: L8, L9. All in programs of their own: pytest itself is not to be forked."""

import pytest
from helpers.programs import must_succeed, run_python

# `os.fork` warns where there are threads, which is what L9 is about; everything else stays an error.
FORK_OPTIONS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")


@pytest.mark.behaviour("L8")
def test_a_forked_child_works_on_plain_memory_and_frees_nothing_of_its_parent() -> None:
    out = must_succeed(
        run_python(
            """
            import os, pickle, sys
            import numpy as np
            import rmm_managed_bridge as bridge

            bridge.install("host", frameworks=["numpy"])
            kept = [np.full(1 << 20, number, "u1") for number in range(8)]
            before = bridge.stats()
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                array = np.ones(10) + 1
                assert not bridge.owns(array)
                assert pickle.loads(pickle.dumps(array)).tolist() == [2.0] * 10
                # Host memory of the parent can be read and dropped; growing it makes a copy outside the pool.
                assert [int(each[-1]) for each in kept] == list(range(8))
                first = kept.pop(0)
                first.resize(2 << 20, refcheck=False)
                assert not bridge.owns(first) and not first.any()
                del first
                kept.clear()
                bridge.uninstall()
                sys.stdout.flush()
                sys.exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            after = bridge.stats()
            assert (after.current_bytes, after.current_count) == (before.current_bytes, before.current_count)
            assert after.total_count == before.total_count
            assert [int(each.sum(dtype=int)) >> 20 for each in kept] == list(range(8))
            """,
            options=FORK_OPTIONS,
        )
    )
    assert out == "0\n"


@pytest.mark.behaviour("L8")
@pytest.mark.parametrize("request_code", ["resource.allocate(1 << 20)", "heap.allocate(1 << 20)"])
def test_a_forked_child_that_asks_for_pool_memory_is_told_why_not(request_code: str) -> None:
    out = must_succeed(
        run_python(
            """
            import os, sys
            import rmm_managed_bridge as bridge
            from rmm_managed_bridge._native import pool as native_pool
            from helpers.programs import HostMemory

            memory = HostMemory()
            resource = bridge.ManagedBridgeResource(memory.resource)
            block = resource.allocate(1 << 20)
            heap = native_pool.host_pool()
            held = dict(memory.live)
            child = os.fork()
            if child == 0:
                try:
                    eval(sys.argv[1])
                except bridge.BridgeError as error:
                    print(error)
                resource.deallocate(block, 1 << 20)
                assert memory.live == held
                sys.stdout.flush()
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            assert resource.get_allocated_bytes() == 1 << 20
            resource.deallocate(block, 1 << 20)
            """,
            request_code,
            options=FORK_OPTIONS,
        )
    )
    text, code = out.rstrip("\n").rsplit("\n", 1)
    assert "forked" in text
    assert "spawn" in text
    assert "out of memory" not in text
    assert code == "0"


@pytest.mark.behaviour("L8")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_that_is_not_forked_from_its_parent_starts_clean(method: str) -> None:
    out = must_succeed(
        run_python(
            """
            import multiprocessing, sys
            import numpy as np
            import rmm_managed_bridge as bridge


            def work(array):
                assert not bridge.status().installed
                assert bridge.stats().total_count == 0
                with bridge.installed("host"):
                    assert bridge.owns(array + 1)
                return float(array.sum())


            if __name__ == "__main__":
                bridge.install("host")
                kept = np.ones(1 << 17)
                with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
                    print(pool.apply(work, (kept,)))
                assert bridge.stats().current_count == 1
            """,
            method,
            options=FORK_OPTIONS,
        )
    )
    assert out == f"{float(1 << 17)}\n"


@pytest.mark.behaviour("L9")
def test_a_hundred_forks_while_another_thread_is_inside_the_pool() -> None:
    out = must_succeed(
        run_python(
            """
            import os, signal, threading
            import numpy as np
            import rmm_managed_bridge as bridge

            bridge.install("host")
            stop = threading.Event()
            rounds = 0


            def allocate():
                global rounds
                with bridge.numpy_allocator("host"):
                    while not stop.is_set():
                        array = np.empty(64 << 10, "u1")
                        rounds += 1
                        del array


            thread = threading.Thread(target=allocate)
            thread.start()
            while rounds == 0:
                pass
            codes = set()
            for _ in range(100):
                child = os.fork()
                if child == 0:
                    signal.alarm(5)  # a child that waits for a lock it inherited is killed, which is no exit code 0
                    array = np.ones(1 << 20, "u1")
                    del array
                    os._exit(0)
                codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            stop.set()
            thread.join()
            print(codes, rounds > 100, bridge.stats().current_count)
            """,
            options=FORK_OPTIONS,
        )
    )
    assert out == "{0} True 0\n"


@pytest.mark.behaviour("L9")
@pytest.mark.parametrize(
    "question",
    [
        "None",
        "bridge.stats()",
        "bridge.snapshot()",
        "bridge.history()",
        "bridge.allocation_of(kept)",
        "bridge.owns(kept)",
        "bridge.trim()",
        "bridge.reset_peak()",
        "bridge.uninstall()",
    ],
)
def test_a_child_of_native_code_that_is_inside_the_pool_does_not_wait_for_its_locks(question: str) -> None:
    """The thread above holds the GIL inside the pool, so a fork never meets it there; these do not hold it."""
    out = must_succeed(
        run_python(
            """
            import ctypes, os, signal, sys, threading
            import numpy as np
            import rmm_managed_bridge as bridge
            from rmm_managed_bridge._native import numpy_handler

            bridge.install("host")
            kept = np.ones(1000)
            bridge.record_events(10)
            get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
            get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            handler = get_pointer(numpy_handler.current(), b"mem_handler")
            context, malloc, _, _, free = (ctypes.c_void_p.from_address(handler + 128 + 8 * i).value for i in range(5))
            malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(malloc)
            free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(free)
            stop = threading.Event()


            def allocate():
                while not stop.is_set():
                    free(context, malloc(context, 64 << 10), 64 << 10)


            threads = [threading.Thread(target=allocate) for _ in range(2)]
            for thread in threads:
                thread.start()
            codes = set()
            for _ in range(100 if sys.argv[1] == 'None' else 40):
                child = os.fork()
                if child == 0:
                    signal.alarm(5)
                    array = np.ones(1 << 20, "u1")
                    eval(sys.argv[1])
                    del array
                    os._exit(0)
                codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                if codes != {0}:
                    break
            stop.set()
            for thread in threads:
                thread.join()
            print(codes, bridge.stats().current_count)
            """,
            question,
            options=FORK_OPTIONS,
        )
    )
    assert out == "{0} 1\n"


@pytest.mark.behaviour("L8")
def test_a_child_copies_no_page_of_a_device_while_it_exits_either() -> None:
    """The read would be SIGSEGV. Host memory is moved out, as in the midst of its life."""
    out = must_succeed(
        run_python(
            """
            import atexit, os

            parent = os.getpid()

            def grow():
                print(bool(handler.realloc(ptr, 2 << 20)), bool(handler.realloc(other, 2 << 20)), flush=True)

            # Runs after the bridge's own, which is registered later.
            atexit.register(lambda: os.getpid() == parent or grow())
            from rmm_managed_bridge._native import pool as native_pool, numpy_handler

            handler = numpy_handler.NumpyHandler()
            # The first stands for managed memory.
            heaps = [native_pool.host_pool(kind="managed", device=0), native_pool.host_pool()]
            handler.use(heaps[0])
            ptr = handler.malloc(1 << 20)
            handler.use(heaps[1])
            other = handler.malloc(1 << 20)
            child = os.fork()
            if child != 0:
                assert os.waitpid(child, 0)[1] == 0
            """,
            options=FORK_OPTIONS,
        )
    )
    assert out.split() == ["False", "True"]


CHILD = """
    import os, sys
    import numpy as np
    import rmm_managed_bridge as bridge


    def in_child(work):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            work()
            sys.stdout.flush()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0


    bridge.install("host", frameworks=["numpy"])
    kept = np.arange(1 << 18)
    assert bridge.stats().current_count == 1
"""


@pytest.mark.behaviour("L8")
def test_a_child_is_told_that_it_is_one_and_its_figures_are_its_own() -> None:
    must_succeed(
        run_python(
            CHILD
            + """
    import warnings


    def work():
        status, stats = bridge.status(), bridge.stats()
        assert (status.installed, status.forked, status.pools) == (False, True, ())
        assert "fork" in str(status) and "fork" in repr(status)
        assert (stats.current_bytes, stats.peak_bytes, stats.total_count, stats.reserved_bytes) == (0, 0, 0, 0)
        assert bridge.snapshot().allocations == () and list(bridge.history()) == []
        assert bridge.allocation_of(kept) is None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with bridge.tag("load", limit="1KiB"):
                np.ones(1 << 20)
        (said,) = caught
        assert "limits nothing" in str(said.message) and "forked" in str(said.message)


    with bridge.tag("outer"), bridge.peak_scope() as scope:
        in_child(work)
    assert not bridge.status().forked and bridge.status().installed
    assert bridge.stats().current_count == 1
""",
            options=FORK_OPTIONS,
        )
    )


@pytest.mark.behaviour("L8")
@pytest.mark.parametrize("track", ["sites", "off"])
def test_a_child_that_installs_has_a_pool_of_its_own(track: str) -> None:
    must_succeed(
        run_python(
            CHILD
            + """
    old_resource = bridge._native.pool.host_pool()
    old_block = old_resource.allocate(1000)


    def refused(pool):
        try:
            pool.allocate(1 << 20)
        except bridge.BridgeError as error:
            return "forked" in str(error)


    def work(depth=0):
        inherited = [kept, np.arange(10)]
        before = bridge.status()
        assert bridge.install("host", frameworks=["numpy"], track=sys.argv[1]) is not None
        assert bridge.status().installed and bridge.status().forked and "forked" in str(bridge.status())
        x = np.ones(1 << 17)
        assert bridge.owns(x) and not bridge.owns(inherited[1])
        assert len(bridge.status().pools) == 1 and bridge.status().pools[0].current_bytes >= 1 << 20
        if sys.argv[1] == "sites":
            assert bridge.stats().current_count == 1 and bridge.allocation_of(x).requested_bytes == 1 << 20
            with bridge.tag("load", limit="1MiB"):
                try:
                    np.ones(1 << 20)
                except MemoryError:
                    pass
                else:
                    raise AssertionError("the limit holds here")
        x.resize(1 << 18, refcheck=False)
        x = np.concatenate([x, x])
        del x
        assert bridge.stats().current_bytes == 0
        # What is inherited is read, resized and dropped, and goes nowhere.
        copy = np.arange(1 << 18)
        assert refused(old_resource)
        old_resource.deallocate(old_block)
        assert old_resource.trim() == 0
        assert (kept == copy).all()
        mine = inherited.pop(0).copy()
        if depth == 0:
            y = np.full(1000, 7)
            in_child(lambda: work(1))
            assert (y == 7).all()
        bridge.uninstall()
        assert not bridge.owns(np.ones(1000))


    in_child(work)
    assert bridge.stats().current_count == 2 and (kept == np.arange(1 << 18)).all()
    assert old_resource.allocate(1000) != old_block
""",
            track,
            options=FORK_OPTIONS,
        )
    )


@pytest.mark.behaviour("L8")
def test_a_child_frees_and_resizes_inherited_arrays_beside_a_pool_of_its_own() -> None:
    must_succeed(
        run_python(
            CHILD
            + """
    def work():
        global kept
        bridge.install("host", frameworks=["numpy"])
        mine = np.ones(1 << 18)
        kept.resize(1 << 19, refcheck=False)
        assert kept[: 1 << 18].tolist() == list(range(1 << 18))
        assert bridge.stats().current_count == 1
        del kept
        assert bridge.stats().foreign_frees == 0
        assert (mine == 1).all()


    in_child(work)
""",
            options=FORK_OPTIONS,
        )
    )


@pytest.mark.behaviour("L8")
def test_a_child_of_a_parent_that_only_imported_the_bridge_may_install() -> None:
    program = """
import os
import rmm_managed_bridge as bridge
child = os.fork()
if child == 0:
    import numpy as np
    with bridge.installed("host", frameworks=["numpy"]):
        os._exit(0 if bridge.owns(np.ones(1000)) else 3)
os.waitpid(child, 0)[1] == 0 or os._exit(4)
"""
    must_succeed(run_python(program))
