"""Process scope where programs end, fork, trace memory or check it: L1, L8."""

import pytest
from helpers.programs import must_succeed, run_python

FORK_OPTIONS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
KEEPS_EVERYTHING = """
    import sys, threading
    import numpy as np
    import rmm_managed_bridge as bridge

    early = [np.ones(size, "u1") for size in (1, 100, 5000, 1 << 20)]
    bridge.install("host", numpy_scope="process")
    kept = []
    threads = [threading.Thread(target=lambda: kept.extend(np.ones(1 << n, "u1") for n in range(20))) for _ in range(4)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert all(map(bridge.owns, kept)) and not any(map(bridge.owns, early))
    cycle = [np.ones(1000), np.ones(10)]
    cycle.append(cycle)
    early.append(early)
    if sys.argv[1] == "uninstalled":
        bridge.uninstall()
    late = [np.ones(size, "u1") for size in (1, 100, 5000, 1 << 20)]
    early[2].resize(100, refcheck=False)
    kept[-1].resize(100, refcheck=False)


    class Last:
        def __del__(self, numpy=np):
            array = numpy.ones(1000)
            array.resize(100_000, refcheck=False)


    sys.modules["last"] = Last()
"""


@pytest.mark.behaviour("L1")
@pytest.mark.parametrize("state", ["installed", "uninstalled"])
@pytest.mark.parametrize("malloc", ["", "debug", "malloc"])
def test_programs_end_silently(state: str, malloc: str) -> None:
    must_succeed(run_python(KEEPS_EVERYTHING, state, environment={"PYTHONMALLOC": malloc} if malloc else None))


@pytest.mark.behaviour("L8")
@pytest.mark.parametrize("malloc", ["", "debug"])
def test_a_child_forked_from_a_thread_works_on_numpys_own_memory(malloc: str) -> None:
    out = must_succeed(
        run_python(
            """
            import os, sys, threading
            import numpy as np
            import rmm_managed_bridge as bridge

            early = [np.full(size, 5, "u1") for size in (10, 1000, 1 << 20)]
            bridge.install("host", numpy_scope="process")
            kept = [np.full(size, 7, "u1") for size in (10, 1000, 1 << 20)]
            sys.stdout.flush()


            def child():
                fresh = [np.ones(size, "u1") for size in (10, 1000, 1 << 20) for _ in range(50)]
                assert not any(map(bridge.owns, fresh))
                for array, value in [(each, 7) for each in kept] + [(each, 5) for each in early]:
                    size = array.size
                    array.resize(3 * size, refcheck=False)  # a block of the parent's pool is copied out, and left alone
                    assert not bridge.owns(array)
                    assert set(array[:size].tolist()) == {value} and not array[size:].any()
                fresh.clear()
                kept.clear()
                early.clear()
                threading.Thread(target=lambda: np.ones(1 << 20)).start()
                bridge.uninstall()
                assert np._core.multiarray.get_handler_name() == "default_allocator"


            def fork():
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        child()
                        code = 0
                    finally:
                        os._exit(code)
                print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


            for _ in range(5):
                thread = threading.Thread(target=fork)
                thread.start()
                thread.join()
            assert bridge.stats().current_count == 3 and all(each.all() for each in kept)
            """,
            options=FORK_OPTIONS,
            environment={"PYTHONMALLOC": malloc} if malloc else None,
        )
    )
    assert out == "0\n" * 5


def test_tracemalloc_counts_arrays_of_both_kinds() -> None:
    must_succeed(
        run_python(
            """
            import tracemalloc
            import numpy as np
            import rmm_managed_bridge as bridge

            domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)


            def traced():
                snapshot = tracemalloc.take_snapshot().filter_traces([domain])
                return sum(trace.size for trace in snapshot.traces)


            tracemalloc.start()
            early = np.ones(1 << 20, "u1")
            with bridge.installed("host", numpy_scope="process"):
                before = traced()
                late = np.ones(1 << 20, "u1")
                assert traced() - before == 1 << 20
                del early
                assert traced() - before == 0
                late.resize(3 << 20, refcheck=False)
                assert traced() - before == 2 << 20
            del late
            assert traced() - before == -(1 << 20)
            """
        )
    )


def test_the_capsule_that_somebody_else_points_elsewhere_is_left_alone() -> None:
    must_succeed(
        run_python(
            """
            import ctypes, warnings
            import numpy as np
            import rmm_managed_bridge as bridge
            from rmm_managed_bridge._native import numpy_handler

            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            point = ctypes.pythonapi.PyCapsule_SetPointer
            point.argtypes = [ctypes.py_object, ctypes.c_void_p]
            name = np._core.multiarray.get_handler_name

            bridge.install("host", numpy_scope="process")
            array = np.ones(10)
            capsule = numpy_handler.default_handler().capsule
            ours = ctypes.string_at(get(capsule, b"mem_handler"), 168)
            theirs = ctypes.create_string_buffer(b"theirs".ljust(127, bytes(1)) + ours[127:])  # passes on to ours
            point(capsule, ctypes.addressof(theirs))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                bridge.uninstall()
            assert "replaced by somebody else" in str(caught[0].message), caught
            assert name() == "theirs" and not bridge.owns(np.ones(10))
            try:
                bridge.install("host", frameworks=["numpy"], numpy_scope="process")
            except bridge.FrameworkError as error:
                assert "'theirs'" in str(error), error
            else:
                raise AssertionError("it was taken over a second time")
            assert name() == "theirs" and not bridge.owns(np.ones(10))
            with bridge.installed("host", numpy_scope="context"):
                assert bridge.owns(np.ones(10))
            del array
            assert bridge.stats().current_count == 0
            """
        )
    )
