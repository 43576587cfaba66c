"""A pool keeps about twice what was alive lately; large arrays grow in place, and zeros are lazy."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge.config import read_config

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def host() -> Iterator[None]:
    """Install on the host backend, with NumPy."""
    with bridge.installed("host", frameworks=["numpy"]):
        bridge.reset_peak()
        yield


def within_bound() -> bool:
    now = bridge.stats()
    return now.reserved_bytes <= 2 * now.peak_bytes + 128 * MIB


def test_an_array_that_grows_by_concatenation_leaves_its_sizes_behind(host: None) -> None:
    before = resident_bytes()
    array, chunk = np.zeros(MIB, "u1"), np.ones(2 * MIB, "u1")
    for _ in range(60):
        array = np.concatenate([array, chunk])
        assert within_bound()
        assert resident_bytes() - before <= 2 * bridge.stats().peak_bytes + 128 * MIB
    assert array.sum() == 120 * MIB


def test_sizes_that_rise_and_fall_stay_within_the_bound(host: None) -> None:
    for size in [*range(1, 120, 7), *range(120, 1, -7)] * 2:
        array = np.empty(size * MIB, "u1")
        array = np.concatenate([array, array[: MIB // 2]])
        assert within_bound()
        del array
    assert bridge.stats().given_back_count > 0


def test_two_sizes_in_turn_cost_no_call_once_both_were_there(host: None) -> None:
    def turn() -> None:
        for size in (60 * MIB, 20 * MIB, 90 * MIB):
            del_me = np.empty(size, "u1")
            del del_me

    turn()
    before = bridge.stats()
    for _ in range(50):
        turn()
    now = bridge.stats()
    assert (now.given_back_count, now.reserved_bytes) == (before.given_back_count, before.reserved_bytes)


def test_an_array_that_is_resized_in_steps_takes_no_more_than_it_has(host: None) -> None:
    array = np.empty(MIB, "u1")
    array[:] = 7
    for size in range(2, 200):
        array.resize(size * MIB, refcheck=False)
        array[-1] = 9
        assert bridge.stats().reserved_bytes <= size * MIB + 128 * MIB
    assert array[:MIB].tobytes() == bytes([7]) * MIB
    assert array[2 * MIB - 1 :: MIB].tolist() == [9] * 198
    for size in range(199, 3, -5):
        array.resize(size * MIB, refcheck=False)
        assert array[-1] == 9
    record = bridge.allocation_of(array)
    assert record is not None
    assert record.requested_bytes == array.nbytes
    assert record.resized_count == 198 + 39


def test_large_zeros_are_lazy_every_time(host: None) -> None:
    for _ in range(5):
        before = resident_bytes()
        array = np.zeros(256 * MIB, "u1")
        assert resident_bytes() - before < 64 * MIB
        assert not array[:: MIB // 2].any()
        array[: 40 * MIB] = 1
        del array
    used = np.ones(40 * MIB, "u1")
    del used
    assert not np.zeros(40 * MIB - 12345, "u1").any()
    assert not np.zeros(8 * MIB, "u1").any()


def test_the_kernel_decides_how_much_there_is(host: None) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    many = [np.zeros(total // 4, "u1") for _ in range(6)]
    assert sum(array.nbytes for array in many) > total
    with pytest.raises(MemoryError) as refused:
        np.empty(1 << 46, "u1")
    assert "refused by the kernel" in refused.value.__notes__[0]


def test_a_size_class_that_is_hardly_used_takes_little(host: None) -> None:
    kept = [np.empty(int(1000 * 1.06**step), "u1") for step in range(128)]
    assert within_bound()
    assert bridge.stats().slab_free_bytes <= bridge.stats().cached_bytes
    del kept


@pytest.mark.parametrize("retain", ["budget", "all"])
def test_a_program_that_sleeps_keeps_its_peak_only_if_it_was_asked_to(retain: str) -> None:
    with bridge.installed("host", frameworks=["numpy"], retain=retain):
        array = np.empty(600 * MIB, "u1")
        del array
        assert bridge.stats().reserved_bytes >= 600 * MIB
        if retain == "all":
            assert not eventually(lambda: bridge.stats().reserved_bytes < 600 * MIB, seconds=3)
        else:
            assert eventually(lambda: bridge.stats().reserved_bytes <= 128 * MIB, seconds=20)


def test_a_release_threshold_takes_the_place_of_the_budget() -> None:
    with bridge.installed("host", frameworks=["numpy"], release_threshold="1GiB"):
        for _ in range(3):
            array = np.empty(600 * MIB, "u1")
            del array
            array = np.empty(300 * MIB, "u1")
            del array
        assert bridge.stats().cached_bytes >= 600 * MIB


def test_what_was_asked_for_at_first_is_never_too_much() -> None:
    with bridge.installed("host", frameworks=["numpy"], initial_pool_size="400MiB"):
        array = np.empty(300 * MIB, "u1")
        del array
        before = bridge.stats()
        assert not eventually(lambda: bridge.stats().reserved_bytes < before.reserved_bytes, seconds=3)


def test_a_bad_word_names_the_good_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(bridge.ConfigError, match="retain='some' is not one of 'budget', 'all'"):
        bridge.install("host", retain="some")
    monkeypatch.setenv("RMM_BRIDGE_RETAIN", "none")
    with pytest.raises(bridge.ConfigError, match="RMM_BRIDGE_RETAIN='none' is not one of"):
        bridge.install("host")


FORKS = """
import os, sys, time, warnings
import numpy as np
import rmm_managed_bridge as bridge
from rmm_managed_bridge.config import read_config

warnings.simplefilter("error")
def threads():
    return len(os.listdir("/proc/self/task"))
bridge.install("host", frameworks=["numpy"])
alone = threads()
array = np.empty(200 << 20, "u1")
assert threads() == alone + 1, "more than 64 MiB are looked after"
seen = []
os.register_at_fork(after_in_parent=lambda: seen.append(threads()))
for turn in range(20):
    child = os.fork()
    if child == 0:
        os._exit(0 if threads() == 1 and array.nbytes else 1)
    assert os.waitpid(child, 0)[1] == 0
    del array
    array = np.empty(200 << 20, "u1")
    assert threads() == alone + 1, "it begins again"
assert seen == [alone] * 20, seen
"""


def test_a_fork_finds_no_thread_of_the_bridges(tmp_path: Path) -> None:
    program = tmp_path / "forks.py"
    program.write_text(FORKS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_thread_is_there_while_little_is_reserved(tmp_path: Path) -> None:
    program = tmp_path / "small.py"
    program.write_text(
        "import os, numpy as np, rmm_managed_bridge as bridge\n"
        "bridge.install('host', frameworks=['numpy'])\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "for _ in range(100): array = np.ones(20 << 20, 'u1')\n"
        "assert bridge.stats().reserved_bytes <= 64 << 20\n"
        "assert len(os.listdir('/proc/self/task')) == before\n",
        encoding="utf-8",
    )
    subprocess.run([sys.executable, str(program)], check=True)


CYCLES = """
import os, sys
from pathlib import Path
import numpy as np
import rmm_managed_bridge as bridge
from rmm_managed_bridge.config import read_config

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def cycles(count):
    for _ in range(count):
        with bridge.installed("host"):
            np.ones(10)

cycles(50)
before = resident_bytes()
cycles(300)
print((resident_bytes() - before) // 300)
"""


def test_a_pool_that_has_ended_leaves_little_behind(tmp_path: Path) -> None:
    """Lanes and the pool stay, since a wrong free may look for them; its tables of blocks go to the next pool."""
    program = tmp_path / "cycles.py"
    program.write_text(CYCLES, encoding="ascii")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50 << 10


@pytest.mark.parametrize(("said", "meant"), [(True, True), (False, False), ("0", False), ("Yes", True), ("off", False)])
def test_populate_is_a_switch_in_code_and_in_the_environment(said: bool | str, meant: bool) -> None:
    assert read_config(environment={}).populate
    assert read_config(populate=said, environment={}).populate is meant
    assert read_config(environment={"RMM_BRIDGE_POPULATE": str(said)}).populate is meant


@pytest.mark.parametrize("said", ["maybe", 1, 0.5])
def test_what_is_neither_true_nor_false_is_no_switch(said: object) -> None:
    with pytest.raises(bridge.ConfigError, match=r"populate=.* is neither True nor False"):
        bridge.install("host", populate=said)  # type: ignore[arg-type]
