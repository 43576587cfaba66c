"""A recording outlives its process, tells what the ledger tells, and harms neither the program nor other files."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.programs import must_succeed, program_environment, run_python

import rmm_managed_bridge as bridge
from rmm_managed_bridge.recordings import read
from rmm_managed_bridge.recordings.layout import ALLOCATE, DEALLOCATE, FAILURE, RESIZE

KILLS = int(os.environ.get("BRIDGE_RECORDING_KILLS", "3"))

START = """
import os, signal, sys, threading
import numpy as np
import rmm_managed_bridge as bridge
bridge.install("host", frameworks=["numpy"])
"""


def test_it_tells_what_the_ledger_tells(tmp_path: Path) -> None:
    with bridge.installed("host"):
        before = np.ones(5000)
        bridge.reset_peak()
        with bridge.record(tmp_path / "a.rec", size="4MiB") as recording:
            with bridge.tag("ülöad"):
                x = np.ones(1 << 20)
                y = np.ones(1 << 19)
            del y
            z = np.ones(1000)
            z.resize(200_000, refcheck=False)
            now = bridge.snapshot()
        content = read(recording.path)
        found = {each.serial: each for each in content.snapshot().allocations}
        for each in now.allocations:
            assert found[each.serial] == each
        assert {each.site.via.function for each in found.values() if each.site.via} == {"ones"}
        assert content.current_bytes == now.current_bytes
        assert content.ended and content.notes == () and content.forgotten_count == 0
        mine = content.events[content.events["serial"] == bridge.allocation_of(z).serial]
        assert list(mine["action"]) == [ALLOCATE, RESIZE]
        assert list(mine["extra"]) == [0, 8000]
        assert content.kept_peak_bytes == now.peak.current_bytes
        assert {"ülöad"} <= {holder.tag for holder in content.peak.holders}
        del before, x, z, mine


def test_who_held_a_peak_that_was_forgotten(tmp_path: Path) -> None:
    with bridge.installed("host"):
        bridge.reset_peak()
        with bridge.record(tmp_path / "a.rec", size="4MiB") as recording:
            with bridge.tag("high"):
                x = np.ones(1 << 20)
            del x
            for _ in range(40_000):
                np.empty(100)
        now = bridge.stats()
        content = read(recording.path)
        assert content.forgotten_count > 0
        assert not content.peak_is_kept
        assert content.peak.current_bytes == now.peak_bytes
        assert content.peak.top(1)[0].tag == "high"
        assert content.current_bytes == now.current_bytes


def test_failures_are_events(tmp_path: Path) -> None:
    with bridge.installed("host", maximum_pool_size="64MiB"):
        with bridge.record(tmp_path / "a.rec", size="4MiB") as recording, pytest.raises(MemoryError):
            np.empty(1 << 30)
        content = read(recording.path)
        failed = content.events[content.events["action"] == FAILURE]
        assert list(failed["bytes"]) == [8 << 30]
        assert content.names.site(int(failed["site"][0])).file == __file__


def test_the_file_is_its_owners_and_nobodys_else_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        with pytest.raises(bridge.BridgeError, match="not overwritten"):
            bridge.record(tmp_path / name)
    assert (tmp_path / "there").read_text() == "precious"
    assert not (tmp_path / "elsewhere").exists()
    with bridge.record(tmp_path / "%h-%p-100%%.rec", size="4MiB") as recording:
        assert recording.path.name.endswith(f"-{os.getpid()}-100%.rec")
        assert stat.S_IMODE(recording.path.stat().st_mode) == 0o600
        with pytest.raises(bridge.BridgeError, match="already"):
            bridge.record(tmp_path / "second.rec")
    with pytest.raises(bridge.BridgeError, match="has ended"), recording:
        pass


def test_what_cannot_be_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(bridge.BridgeError, match="No such file"):
        bridge.record(tmp_path / "nowhere" / "a.rec")
    with pytest.raises(bridge.ConfigError, match=r"4\.00 MiB"):
        bridge.record(tmp_path / "a.rec", size=1)
    with pytest.raises(bridge.ConfigError, match="name of a file"):
        bridge.record(b"a.rec")  # type: ignore[arg-type]
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
import rmm_managed_bridge as bridge
try:
    bridge.record({str(tmp_path / "a.rec")!r})
except bridge.BridgeError as error:
    print(error)
"""
    assert "to be had there" in must_succeed(run_python(code))
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_its_parents_file_alone(tmp_path: Path) -> None:
    code = f"""{START}
recording = bridge.record({str(tmp_path / "a.rec")!r}, size="4MiB")
x = np.ones(1000)
child = os.fork()
if child == 0:
    assert not recording.active
    recording.stop()
    y = [np.ones(77_777) for _ in range(10)]
    with bridge.record({str(tmp_path / "child.rec")!r}, size="4MiB"):
        bridge.install("host")
        z = np.ones(55_555)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert recording.active
y = np.ones(33_333)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code, options=("-W", "ignore")).returncode == -9
    sizes = set(read(tmp_path / "a.rec").events["bytes"] // 8)
    assert {1000, 33_333} <= sizes
    assert not {77_777, 55_555} & sizes
    assert 55_555 in read(tmp_path / "child.rec").events["bytes"] // 8


def test_the_variable_is_for_the_program_and_its_children_add_their_number(tmp_path: Path) -> None:
    code = f"""{START}
import subprocess
x = np.ones(12_345)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, *sys.argv, "child"], check=True)
"""
    path = tmp_path / "a.rec"
    must_succeed(run_python(code, environment={"RMM_BRIDGE_RECORD": str(path)}))
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert files[0] == path
    assert files[1].name.startswith("a.rec.")
    for file in files:
        content = read(file)
        assert content.ended
        assert 12_345 * 8 in content.blocks["bytes"]
        assert file == path or file.name == f"a.rec.{content.header.pid}"
    again = run_python(code, environment={"RMM_BRIDGE_RECORD": str(path)})
    assert "RMM_BRIDGE_RECORD: cannot record" in again.stderr


WRITERS = (
    START
    + """
recording = bridge.record(sys.argv[1], size="4MiB")
def work(number):
    with bridge.tag(f"thread {number}"):
        kept = [np.empty(number * 1000 + 1) for _ in range(50)]
        while True:
            for i in range(100):
                kept[i % 50] = np.empty(number * 1000 + i)
for number in range(4):
    threading.Thread(target=work, args=(number,), daemon=True).start()
print("go", flush=True)
threading.Event().wait()
"""
)


@pytest.mark.parametrize("turn", range(KILLS))
def test_killed_in_the_midst_of_four_threads(tmp_path: Path, turn: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(WRITERS)
    path = tmp_path / "a.rec"
    with subprocess.Popen(
        [sys.executable, program, path], env=program_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        while read(path).header.taken < 20_000 + 7919 * turn:
            pass
        process.kill()
    content = read(path)
    assert not content.ended
    assert content.notes == ()
    # All but what each thread had taken and not written, and one event of each in the midst.
    assert len(content.events) >= min(content.header.taken, content.header.event_count) - 5 * 64
    assert 4 * 49 <= len(content.blocks) <= 4 * 51
    assert {f"thread {number}" for number in range(4)} <= {holder.tag for holder in content.holders(content.blocks)}
    assert (content.live_bytes >= 0).all()


def test_eight_threads_at_random_leave_what_the_ledger_has(tmp_path: Path) -> None:
    code = f"""{START}
import random
def work(seed):
    draw = random.Random(seed)
    kept = []
    for _ in range(4000):
        if kept and draw.random() < 0.5:
            kept.pop(draw.randrange(len(kept)))
        elif kept and draw.random() < 0.1:
            kept[-1].resize(draw.randrange(1, 50_000), refcheck=False)
        else:
            kept.append(np.empty(draw.randrange(1, 5000)))
    alive.append(kept)
alive = []
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
for thread in threads: thread.start()
recording = bridge.record({str(tmp_path / "a.rec")!r}, size="8MiB")
for thread in threads: thread.join()
now = bridge.snapshot()
recording.stop()
assert now.current_bytes == bridge.stats().current_bytes
bridge.uninstall()
from rmm_managed_bridge.recordings import read
content = read(recording.path)
assert content.notes == (), content.notes
assert content.current_bytes == now.current_bytes
found = {{each.serial: each for each in content.snapshot().allocations}}
assert found == {{each.serial: each for each in now.allocations}}
held = sum(holder.current_bytes for holder in content.holders(content.at_peak))
assert held == content.kept_peak_bytes or content.forgotten_count
last = content.alive_after(len(content.moves))
assert int(last["bytes"].sum()) == content.current_bytes
"""
    must_succeed(run_python(code, timeout=120))


def test_frees_of_blocks_from_before_are_known(tmp_path: Path) -> None:
    with bridge.installed("host"):
        x = np.ones(99_999)
        with bridge.record(tmp_path / "a.rec", size="4MiB") as recording:
            del x
        content = read(recording.path)
        assert int(content.live_bytes[0]) == content.current_bytes + 99_999 * 8
        assert list(content.events["action"][content.events["bytes"] == 99_999 * 8]) == [DEALLOCATE]
        assert 99_999 * 8 in content.alive_after(0)["bytes"]
