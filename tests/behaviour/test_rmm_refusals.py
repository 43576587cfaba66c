"""What RMM's pool refuses and is then served is not told on the terminal; what is not served is told in the error."""

import pytest
from helpers.programs import run_python, silent_stderr

pytestmark = [pytest.mark.requires("no_gpu"), pytest.mark.behaviour("M7")]

# A pool of RMM's that has 256 MiB, and a piece of the program's own in it.
PROGRAM = """
    import threading
    import rmm
    import rmm_managed_bridge as bridge
    from helpers.programs import HostMemory

    MIB = 1 << 20
    memory = HostMemory()
    below = rmm.mr.PoolMemoryResource(memory.resource, initial_pool_size=64 * MIB, maximum_pool_size=256 * MIB)
    resource = bridge.ManagedBridgeResource(below)
"""

SERVED = """
    for _ in range(3):
        for step in range(1, 25):
            size = step * 10 * MIB
            resource.deallocate(resource.allocate(size), size)
    print("served")
"""

SERVED_IN_THREADS = """
    def work(seed):
        for step in range(200):
            size = (seed + step * 7) % 60 * MIB + 1
            resource.deallocate(resource.allocate(size), size)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("served")
"""

REFUSED = """
    try:
        resource.allocate(300 * MIB)
    except MemoryError as error:
        print(error)
"""

RMMS_OWN = """
    try:
        below.allocate(300 * MIB)
    except MemoryError:
        print("refused")
"""


@pytest.mark.parametrize("program", [SERVED, SERVED_IN_THREADS])
def test_what_is_served_in_the_end_is_silent(program: str) -> None:
    result = run_python(PROGRAM + program)
    assert (result.returncode, silent_stderr(result), result.stdout) == (0, "", "served\n")


def test_what_is_not_served_is_told_once_in_the_error() -> None:
    result = run_python(PROGRAM + REFUSED)
    assert (result.returncode, silent_stderr(result)) == (0, "")
    assert "refused by the RMM resource that the pool stands on: " in result.stdout
    assert "Maximum pool size exceeded" in result.stdout


@pytest.mark.parametrize("before", ["", SERVED, SERVED_IN_THREADS, REFUSED])
def test_rmm_says_what_it_refuses_to_others_as_ever(before: str) -> None:
    result = run_python(PROGRAM + before + RMMS_OWN)
    assert result.returncode == 0
    assert result.stdout.endswith("refused\n")
    assert result.stderr.count("maximum pool size exceeded") == 1


def test_a_program_that_asked_for_more_of_rmms_log_has_it() -> None:
    more = "\n    rmm.set_logging_level(rmm.level_enum.debug)\n"
    result = run_python(PROGRAM + more + REFUSED)
    assert result.returncode == 0
    assert "maximum pool size exceeded" in result.stderr
