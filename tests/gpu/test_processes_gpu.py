"""Exit, import order and fork, each in processes of their own."""

import itertools
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]

_INSTALL = """
import rmm, numpy as np, cupy as cp, warp as wp
wp.config.quiet = True
import rmm_managed_bridge as bridge
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="64MiB", maximum_pool_size="512MiB")
bridge.install(frameworks=["numpy", "cupy", "warp"])
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.behaviour("L1")
def test_a_program_that_does_not_clean_up_exits_cleanly() -> None:
    program = (
        _INSTALL
        + """
class Late:
    def __init__(self): self.array = np.ones(1 << 17)
    def __del__(self): self.array = None
kept = [np.ones(1 << 17) for _ in range(10)] + [cp.ones(1 << 17) for _ in range(10)]
kept += [wp.ones(1 << 17, dtype=wp.float32, device="cuda:0"), rmm.DeviceBuffer(size=1 << 20), bridge.as_cupy(kept[0])]
cycle = [[np.ones(1 << 17), cp.ones(1 << 17)] for _ in range(10)]
cycle.append(cycle)
late = Late()
"""
    )
    for _ in range(5):
        done = run(program)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.behaviour("L2")
@pytest.mark.parametrize("order", list(itertools.permutations(["cupy", "warp", "rmm", "bridge"])), ids="-".join)
def test_no_import_order_breaks_the_exit(order) -> None:
    lines = {
        "cupy": "import cupy as cp",
        "warp": "import warp as wp; wp.config.quiet = True",
        "rmm": "import rmm",
        "bridge": "import rmm_managed_bridge as bridge",
    }
    program = (
        "\n".join(lines[name] for name in order)
        + """
import numpy as np
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="64MiB")
bridge.install()
kept = [np.ones(1 << 17), cp.ones(1 << 17), wp.ones(1 << 18, dtype=wp.float32, device="cuda:0")]
assert bridge.stats().current_count == 3, bridge.stats()
"""
    )
    done = run(program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.behaviour("L8")
def test_a_forked_child_works_on_plain_memory() -> None:
    program = (
        _INSTALL
        + """
import os, sys, warnings
warnings.simplefilter("error")
kept = np.ones(1 << 20)
resource = rmm.mr.get_current_device_resource()
before = bridge.stats()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    child = os.fork()
if child == 0:
    code = 1
    try:
        import pickle
        x = np.ones(10) + 1
        assert pickle.loads(pickle.dumps(x)).sum() == 20
        assert not bridge.owns(x)
        try:
            resource.allocate(1000)
        except bridge.BridgeError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError("allocated")
        del kept
        code = 0
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert bridge.stats().current_bytes == before.current_bytes
assert kept.sum() == 1 << 20
"""
    )
    done = run(program)
    assert (done.returncode, done.stderr) == (0, "")
