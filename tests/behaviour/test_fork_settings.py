"""What is copied for forked children, and where that is settled: L8. A host pool stands for the managed one."""

import pytest
from helpers.programs import must_succeed, run_python

HEAD = """
import os, sys, warnings
import numpy as np
import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process

MIB = 1 << 20


def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return process.fork_counters()[0]


def managed_array():
    native_pool.host_pool(kind="managed")
    with bridge.numpy_allocator("managed"):
        return np.ones(MIB)
"""


@pytest.mark.behaviour("L8")
def test_a_resource_alone_copies_too() -> None:
    must_succeed(
        run_python(
            HEAD
            + """
from helpers.programs import HostMemory
resource = bridge.ManagedBridgeResource(HostMemory().resource)
kept = managed_array()
assert fork() == 1
del kept
assert fork() == 1
"""
        )
    )


@pytest.mark.behaviour("L8")
@pytest.mark.parametrize("free_mib", [400, 3, 0])
def test_the_limit_is_a_quarter_of_what_the_group_has_free(free_mib: int) -> None:
    must_succeed(
        run_python(
            HEAD
            + """
from pathlib import Path
from rmm_managed_bridge.lifecycle import forks

bridge.install("host", frameworks=["numpy"])
assert 0 < forks.default_limit_bytes() <= forks.LARGEST_LIMIT_BYTES
here, free = Path.cwd(), int(sys.argv[1])
group = here / "cgroup" / "mine"
group.mkdir(parents=True)
(here / "proc" / "self").mkdir(parents=True)
(here / "proc" / "self" / "cgroup").write_text("0::/mine\\n")
(group / "memory.max").write_text(f"{1000 * MIB}\\n")
(group / "memory.current").write_text(f"{(1000 - free) * MIB}\\n")
process.find_limits(here / "proc", here / "cgroup")
assert forks.default_limit_bytes() == free * MIB // 4
kept = managed_array()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert fork() == (free == 400)
assert [type(each.message) for each in said] == [bridge.BridgeWarning] * (free != 400)
assert all("more than fork_limit" in str(each.message) for each in said)
""",
            free_mib,
        )
    )


@pytest.mark.behaviour("L8")
def test_nothing_is_moved_over_what_lies_there_already() -> None:
    """The host pool's memory is inherited, as the real one's would be on a driver that inherits it."""
    must_succeed(
        run_python(
            HEAD
            + """
bridge.install("host", frameworks=["numpy"])
heap = native_pool.host_pool(kind="managed", device=0)
ptr = heap.allocate(MIB, cpu=True)
child = os.fork()
if child == 0:
    os._exit(0 if process.lost_in_fork(ptr, MIB) else 1)  # it is not known what that is
assert os.waitpid(child, 0)[1] == 0
assert process.fork_counters()[0] == 1
heap.deallocate(ptr)
"""
        )
    )
