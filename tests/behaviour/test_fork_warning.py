"""The one warning before a fork that leaves managed NumPy arrays to a child: L8, the parent's part.

A host pool stands for the managed one: what is warned of goes by its kind alone.
"""

import pytest
from helpers.programs import must_succeed, run_python

HEAD = """
import os, sys, warnings
import numpy as np
import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import pool as native_pool

MIB = 1 << 20


def fork():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        child = os.fork()  # here
        if child == 0:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found = [each for each in caught if issubclass(each.category, bridge.BridgeWarning)]
    for each in found:
        with open(each.filename) as file:
            assert "# here" in file.read().splitlines()[each.lineno - 1], (each.filename, each.lineno)
    return [str(each.message) for each in found]
"""


@pytest.mark.behaviour("L8")
@pytest.mark.parametrize("track", ["sites", "counters", "off"])
def test_the_parent_is_warned_once_with_count_bytes_and_cure(track: str) -> None:
    out = must_succeed(
        run_python(
            HEAD
            + """
bridge.install("host", frameworks=["numpy"], fork="warn")
host = np.ones(MIB, "u1")
managed = native_pool.host_pool(kind="managed", track=sys.argv[1])
assert fork() == [], "there is no array in it yet"
with bridge.numpy_allocator("managed"):
    kept = [np.ones(MIB, "u1") for _ in range(3)]
assert {native_pool.pool_containing(each.ctypes.data) for each in kept} == {managed}
(said,) = fork()
print(said)
assert fork() == [], "once is enough"
assert all(each.all() for each in kept)
""",
            track,
        )
    )
    assert "fork with 3 NumPy arrays (3.00 MiB) in managed memory" in out
    assert "SIGSEGV" in out
    assert "'spawn' or 'forkserver'" in out


@pytest.mark.behaviour("L8")
@pytest.mark.parametrize("case", ["host memory", "freed", "of another framework"])
def test_there_is_nothing_to_say_where_no_array_of_numpys_is_in_managed_memory(case: str) -> None:
    must_succeed(
        run_python(
            HEAD
            + """
bridge.install("host", frameworks=["numpy"], fork="warn")
managed = native_pool.host_pool(kind="managed")
if sys.argv[1] == "host memory":
    kept = np.ones(MIB, "u1")
elif sys.argv[1] == "freed":
    with bridge.numpy_allocator("managed"):
        np.ones(MIB, "u1")
else:
    kept = managed.allocate(MIB, framework="cupy")
assert fork() == []
with bridge.numpy_allocator("managed"):
    kept = np.ones(MIB, "u1")
assert len(fork()) == 1, "and the one warning is still to come"
""",
            case,
        )
    )


@pytest.mark.behaviour("L8")
def test_the_warning_points_at_the_line_that_starts_the_worker() -> None:
    must_succeed(
        run_python(
            HEAD
            + """
import multiprocessing


def work():
    pass


bridge.install("host", frameworks=["numpy"], fork="warn")
managed = native_pool.host_pool(kind="managed")
with bridge.numpy_allocator("managed"):
    kept = np.ones(MIB, "u1")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()  # the line
worker.join()
assert worker.exitcode == 0
(said,) = [each for each in caught if issubclass(each.category, bridge.BridgeWarning)]
with open(__file__) as file:
    line = file.read().splitlines()[said.lineno - 1]
assert (said.filename, line.strip()) == (__file__, "worker.start()  # the line"), (said.filename, said.lineno)
"""
        )
    )
