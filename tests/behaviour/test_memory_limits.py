"""What the process may have of the machine's memory: control groups in written trees, and a real `ulimit`."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.programs import program_environment
from hypothesis import given, settings
from hypothesis import strategies as st

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import messages
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process

pytestmark = pytest.mark.behaviour("M7")

MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Tree:
    """A /proc and a /sys/fs/cgroup, written as a test wants them."""

    def __init__(self, folder: Path, membership: str, mountinfo: str | None = None) -> None:
        self.proc, self.groups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.groups.mkdir()
        (self.proc / "self" / "cgroup").write_text(membership)
        if mountinfo is not None:
            (self.proc / "self" / "mountinfo").write_text(mountinfo)

    def write(self, group: str, **files: object) -> Path:
        """Write `memory_max` as ``memory.max`` and so on."""
        folder = self.groups / group.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")
        return folder

    def find(self) -> tuple[int | None, str]:
        native_process.find_limits(self.proc, self.groups)
        return native_process.memory_limit()


@pytest.fixture(autouse=True)
def real_again() -> Iterator[None]:
    yield
    native_process.find_limits()


@pytest.fixture
def unified(tmp_path: Path) -> Tree:
    return Tree(tmp_path, "0::/outer/inner\n")


def test_the_smallest_on_the_way_up_counts(unified: Tree) -> None:
    unified.write("outer", memory_max=300 * MIB)
    unified.write("outer/inner", memory_max=500 * MIB)
    assert unified.find() == (300 * MIB, str(unified.groups / "outer/memory.max"))
    assert native_process.allowed_bytes() == 300 * MIB
    # Limits are changed while programs run.
    unified.write("outer/inner", memory_max=200 * MIB)
    assert native_process.memory_limit() == (200 * MIB, str(unified.groups / "outer/inner/memory.max"))


@pytest.mark.parametrize("text", ["max", "", "nonsense", "-1", "99999999999999999999999999"])
def test_what_is_no_limit_limits_nothing(unified: Tree, text: str) -> None:
    unified.write("outer/inner", memory_max=text)
    assert unified.find() == (None, "")
    assert native_process.allowed_bytes() == MACHINE
    assert native_process.memory_pressure() == (0, False)


@pytest.mark.parametrize(
    "membership", ["", "nonsense\n", "0::\n", "4:memory\n", "::::\n", "0::/gone/away\n", "1:cpu:/\n"]
)
def test_what_is_missing_limits_nothing(tmp_path: Path, membership: str) -> None:
    assert Tree(tmp_path, membership).find() == (None, "")
    native_process.find_limits(tmp_path / "nowhere", tmp_path / "nor here")
    assert native_process.memory_limit() == (None, "")


def test_version_1_has_a_hierarchy_of_its_own_and_a_number_for_no_limit(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "5:cpu,cpuacct:/else\n4:memory:/job/step\n0::/\n")
    tree.write("memory", memory_limit_in_bytes=UNLIMITED_V1)
    tree.write("memory/job", memory_limit_in_bytes=100 * MIB)
    tree.write("memory/job/step", memory_limit_in_bytes=UNLIMITED_V1)
    tree.write("memory/else", memory_limit_in_bytes=MIB)
    assert tree.find() == (100 * MIB, str(tree.groups / "memory/job/memory.limit_in_bytes"))


def test_a_container_sees_its_own_group_at_the_mount_and_its_hosts_path(tmp_path: Path) -> None:
    mounts = (
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
        "35 31 0:32 /docker/abc /sys/fs/cgroup/mem\\040ory rw - cgroup cgroup rw,cpu\n"
        "36 31 0:32 /docker/abc /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    )
    tree = Tree(tmp_path, "4:memory:/docker/abc/worker\n", mounts)
    tree.write("memory", memory_limit_in_bytes=300 * MIB)
    assert tree.find()[0] == 300 * MIB
    tree.write("memory/worker", memory_limit_in_bytes=200 * MIB)
    assert tree.find()[0] == 200 * MIB


def test_a_group_outside_of_the_namespace_is_not_followed(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/../../other\n")
    tree.write("", memory_max=400 * MIB)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "memory.max").write_text("1\n")
    assert tree.find()[0] == 400 * MIB


LIMITS = st.one_of(st.none(), st.just("max"), st.integers(1, 10**12))


@settings(max_examples=100, deadline=None)
@given(limits=st.lists(LIMITS, min_size=1, max_size=6), version=st.sampled_from([1, 2]))
def test_the_least_of_any_depth(
    tmp_path_factory: pytest.TempPathFactory, limits: list[int | str | None], version: int
) -> None:
    path = "".join(f"/level{level}" for level in range(len(limits)))
    controllers, root = ("memory", "memory") if version == 1 else ("", "")
    tree = Tree(tmp_path_factory.mktemp("tree"), f"3:{controllers}:{path}\n")
    tree.write(root + path)
    name = "memory_limit_in_bytes" if version == 1 else "memory_max"
    for level, limit in enumerate(limits):
        if limit is not None:
            written = UNLIMITED_V1 if limit == "max" and version == 1 else limit
            tree.write(root + "".join(f"/level{each}" for each in range(level + 1)), **{name: written})
    expected = min((limit for limit in limits if isinstance(limit, int)), default=None)
    assert tree.find()[0] == expected
    assert native_process.allowed_bytes() == min(expected or MACHINE, MACHINE)


def test_pressure_is_what_is_used_beyond_nine_tenths(unified: Tree) -> None:
    unified.write("outer/inner", memory_max=1000 * MIB, memory_current=700 * MIB)
    unified.find()
    assert native_process.memory_pressure() == (0, False)
    unified.write("outer/inner", memory_current=850 * MIB)
    assert native_process.memory_pressure() == (0, True)
    unified.write("outer/inner", memory_current=950 * MIB)
    assert native_process.memory_pressure() == (50 * MIB, True)
    # What the kernel can drop by itself is no pressure.
    unified.write("outer/inner", memory_stat=f"anon 1\ninactive_file {40 * MIB}\nactive_file 7")
    assert native_process.memory_pressure() == (10 * MIB, True)
    unified.write("outer", memory_max=940 * MIB, memory_current=940 * MIB)
    assert native_process.memory_pressure() == (94 * MIB, True)


def test_what_the_kernel_notes_asks_for_more(unified: Tree) -> None:
    events = "low 0\nhigh 0\nmax {}\noom 0\noom_kill 0"
    unified.write("outer/inner", memory_max=1000 * MIB, memory_current=900 * MIB, memory_events=events.format(3))
    unified.find()
    assert native_process.memory_pressure() == (0, True)  # what was before is past
    unified.write("outer/inner", memory_events=events.format(4))
    assert native_process.memory_pressure() == (100 * MIB, True)


def test_the_soft_limit_counts_for_pressure_and_not_as_a_limit(unified: Tree) -> None:
    unified.write("outer/inner", memory_max=1000 * MIB, memory_high=500 * MIB, memory_current=480 * MIB)
    assert unified.find()[0] == 1000 * MIB
    assert native_process.memory_pressure() == (30 * MIB, True)


def test_version_1_has_pressure_too(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/job\n")
    tree.write("memory/job", memory_limit_in_bytes=1000 * MIB, memory_usage_in_bytes=950 * MIB, memory_failcnt=0)
    tree.write("memory/job", memory_stat=f"inactive_file 5\ntotal_inactive_file {20 * MIB}")
    tree.find()
    assert native_process.memory_pressure() == (30 * MIB, True)
    tree.write("memory/job", memory_failcnt=1)
    assert native_process.memory_pressure() == (130 * MIB, True)


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_bridge_gives_back_before_the_kernel_ends_somebody(unified: Tree) -> None:
    unified.write("outer/inner", memory_max=1000 * MIB, memory_current=100 * MIB)
    unified.find()
    pool = native_pool.host_pool()
    ptrs = [pool.allocate(8 * MIB) for _ in range(64)]
    for ptr in ptrs[8:]:
        pool.deallocate(ptr)
    try:
        full = pool.numbers[0]
        assert full >= 512 * MIB
        time.sleep(0.3)
        assert pool.numbers[0] == full  # nobody is in want
        unified.write("outer/inner", memory_current=950 * MIB)
        _wait_for(lambda: pool.numbers[0] <= 64 * MIB + 64 * MIB)
        assert pool.live_bytes == 64 * MIB
    finally:
        unified.write("outer/inner", memory_current=0)
        for ptr in ptrs[:8]:
            pool.deallocate(ptr)
        pool.retire()


def test_the_default_limit_of_a_devices_pool_is_that_of_the_group_and_the_kernels_on_the_host(unified: Tree) -> None:
    unified.write("outer/inner", memory_max=256 * MIB)
    unified.find()
    assert native_process.physical_bytes() == 256 * MIB
    limit = native_process.memory_limit()
    said = messages.who_refused("RMM", True, True, *limit)
    assert re.search(r"limit of the pool, which is the memory there is.*inner/memory\.max \(256 MiB\)", said)
    pool = native_pool.host_pool()
    try:
        pool.deallocate(pool.allocate(300 * MIB))
    finally:
        pool.retire()


def test_the_users_own_limit_is_called_so() -> None:
    with (
        bridge.installed("host", frameworks=[], maximum_pool_size="64MiB") as installed,
        pytest.raises(MemoryError, match="refused by the limit of the pool, maximum_pool_size"),
    ):
        next(iter(installed._pools.all_pools())).allocate(100 * MIB)


UNDER_ULIMIT = """
import numpy as np
import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import process

limit, who = process.memory_limit()
print(limit, who)
bridge.install("host", frameworks=["numpy"])
kept = []
try:
    while True:
        kept.append(np.empty(64 << 20, "u1"))
except MemoryError as error:
    print(len(kept) >= 4, "ulimit -v" in "".join(error.__notes__))
kept.clear()
again = np.ones(128 << 20, "u1")
print(bridge.owns(again), int(again[::4096].sum()))
try:
    np.empty(1 << 50, "u1")
except MemoryError as error:
    print("refused by" in "".join(error.__notes__))
"""


def test_a_program_under_ulimit_is_refused_and_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNDER_ULIMIT)
    limit_kib = 4 << 20
    result = subprocess.run(
        ["bash", "-c", f'ulimit -v {limit_kib} && exec "$@"', "bash", sys.executable, str(program)],
        cwd=tmp_path,
        env=program_environment() | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"{limit_kib << 10} ulimit -v",
        "True True",
        f"True {(128 << 20) // 4096}",
        "True",
    ]


def test_threads_are_no_more_than_the_processors_that_the_group_may_use(tmp_path: Path) -> None:
    bound = len(os.sched_getaffinity(0))
    assert native_process.processors() <= bound
    tree = Tree(tmp_path, "0::/outer/inner\n")
    for quota, expected in [("max 100000", bound), ("150000 100000", 1), ("50000 100000", 1), ("nonsense", bound)]:
        tree.write("/outer", cpu_max=quota)
        tree.write("/outer/inner", cpu_max="max 100000")
        tree.find()
        assert native_process.processors() == expected


def test_threads_are_no_more_than_a_group_of_version_1_may_use(tmp_path: Path) -> None:
    bound = len(os.sched_getaffinity(0))
    tree = Tree(tmp_path, "4:cpu,cpuacct:/job\n")
    for quota, expected in [(-1, bound), (100_000, 1)]:
        folder = tree.write("/cpu/job")
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        tree.find()
        assert native_process.processors() == expected
