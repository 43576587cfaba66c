"""Exit, import order and fork, each in processes of their own."""

import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]

AT_ONCE = 8  # processes, which together hold 1 GiB of managed memory at most
IMPORTS = {
    "numpy": "import numpy as np",
    "cupy": "import cupy as cp",
    "warp": "import warp as wp; wp.config.quiet = True",
    "rmm": "import rmm",
    "torch": "import torch",
    "bridge": "import rmm_managed_bridge as bridge",
}
SAID_AT_A_BAD_END = ("Traceback", "Exception ignored", "terminate called", "core dumped", "Error")
TORCH = ["torch"] if importlib.util.find_spec("torch") else []
_START = """
import sys
frameworks = ["numpy", "cupy", "warp", *(["torch"] if "torch" in sys.modules else [])]
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="64MiB", maximum_pool_size="128MiB")
bridge.install(frameworks=frameworks)
"""
_INSTALL = "\n".join(IMPORTS[name] for name in ("rmm", "numpy", "cupy", "warp", "bridge")) + _START


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *options, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def run_all(program: str, orders: Sequence[Sequence[str]]) -> list[tuple[str, int, str]]:
    """Run the program after the imports in each of these orders; return those that did not end well, and why."""

    def run_one(order: Sequence[str]) -> tuple[str, int, str]:
        lines = "\n".join(IMPORTS[name] for name in order)
        if "torch" not in order:
            done = run(lines + program)
            return "-".join(order), done.returncode, done.stderr
        # PyTorch warns of things that are not our business: of its programs, what is said at a bad end counts.
        done = run(lines + program, "-W", "ignore")
        ended_badly = any(each in done.stderr for each in SAID_AT_A_BAD_END)
        return "-".join(order), done.returncode, done.stderr if ended_badly else ""

    with ThreadPoolExecutor(AT_ONCE) as executor:
        return [done for done in executor.map(run_one, orders) if done[1:] != (0, "")]


@pytest.mark.behaviour("L1")
def test_fifty_programs_that_do_not_clean_up_exit_cleanly() -> None:
    """Each library is imported first in some of them and last in others."""
    program = (
        _START
        + """
class Late:
    def __init__(self): self.array = np.ones(1 << 17)
    def __del__(self): self.array = None
kept = [np.ones(1 << 17) for _ in range(10)] + [cp.ones(1 << 17) for _ in range(10)]
kept += [wp.ones(1 << 17, dtype=wp.float32, device="cuda:0"), rmm.DeviceBuffer(size=1 << 20), bridge.as_cupy(kept[0])]
if "torch" in frameworks:
    kept += [torch.ones(1 << 18, device="cuda"), bridge.as_torch(kept[1])]
cycle = [[np.ones(1 << 17), cp.ones(1 << 17)] for _ in range(10)]
cycle.append(cycle)
late = Late()
"""
    )
    permutations = list(itertools.permutations(["numpy", "cupy", "warp", "rmm"]))
    # PyTorch takes long to load: it is in ten of them.
    with_torch = [(*TORCH, *each) for each in permutations[:20:4]] + [(*each, *TORCH) for each in permutations[3:20:4]]
    orders = [(*each, "bridge") for each in [*permutations, *permutations[:16], *with_torch]]
    assert len(orders) == 50
    for end in (0, -2):
        assert {each[end] for each in orders} == {"numpy", "cupy", "warp", "rmm", *TORCH}
    assert run_all(program, orders) == []


@pytest.mark.behaviour("L2")
def test_no_import_order_breaks_the_exit() -> None:
    program = (
        _START
        + """
kept = [
    np.ones(1 << 17),
    cp.ones(1 << 17),
    wp.ones(1 << 18, dtype=wp.float32, device="cuda:0"),
    rmm.DeviceBuffer(size=1 << 20),
]
if "torch" in frameworks:
    kept.append(torch.ones(1 << 18, device="cuda"))
held = bridge.snapshot().by("framework")
assert held.keys() == {*frameworks, "rmm"} and min(held.values()) >= 1 << 20, held
"""
    )
    orders = [("numpy", *each) for each in itertools.permutations(["cupy", "warp", "rmm", "bridge"])]
    if TORCH:
        for name in IMPORTS:
            others = [each for each in IMPORTS if each != name]
            orders += [(name, *others), (*others, name)]
    assert run_all(program, orders) == []


@pytest.mark.behaviour("L1")
def test_structures_and_graphs_of_warp_are_alive_at_the_exit() -> None:
    """They hold memory of Warp's own and arrays of the pool, and go in whatever order the interpreter takes them."""
    program = """
points = np.random.default_rng(0).random((300, 3), np.float32)
on_device, low, high = (wp.array(points + shift, dtype=wp.vec3, device="cuda:0") for shift in (0.0, -0.01, 0.01))
bvh = wp.Bvh(low, high)
grid = wp.HashGrid(16, 16, 16, device="cuda:0")
grid.build(on_device, 0.1)
mesh = wp.Mesh(on_device, wp.array(np.arange(300), dtype=wp.int32, device="cuda:0"))
a = wp.zeros(1000, dtype=wp.float32, device="cuda:0")
b = wp.ones(1000, dtype=wp.float32, device="cuda:0")
wp.synchronize_device("cuda:0")
with wp.ScopedCapture("cuda:0", force_module_load=False) as capture:
    wp.copy(a, b)
wp.capture_launch(capture.graph)
assert (bridge.as_numpy(a) == 1).all()
assert bridge.owns(mesh.points) and bridge.owns(bvh.lowers)
cycle = [bvh, grid, mesh, capture]
cycle.append(cycle)
"""
    orders = [
        ("numpy", "rmm", "cupy", "warp", "bridge"),
        ("warp", "cupy", "rmm", "bridge", "numpy"),
        ("bridge", "rmm", "numpy", "cupy", "warp"),
    ]
    assert run_all(_START + program, orders) == []


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
