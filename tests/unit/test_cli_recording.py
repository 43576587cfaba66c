"""The verbs about recordings: the same answer for people and for programs, and the exit codes."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.programs import program_environment

import rmm_managed_bridge as bridge
from rmm_managed_bridge.cli.main import main

HERE = str(Path(__file__))


def make(path: Path, blocks: int) -> tuple[Path, int]:
    """Record `blocks` arrays that stay, one that does not, and one failure; return an address of the first too."""
    with bridge.installed("host", maximum_pool_size="256MiB"), bridge.record(path, size="4MiB"):
        with bridge.tag("kept"):
            kept = [np.empty(10_000) for _ in range(blocks)]
        with bridge.tag("[red]high"):
            high = np.empty(1 << 20)
        del high
        with pytest.raises(MemoryError):
            np.empty(1 << 30)
        address = kept[0].ctypes.data + 100
    return path, address


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return make(tmp_path_factory.mktemp("recorded") / "a.rec", 3)


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Run a verb twice, for people and for programs; return the latter."""
    assert main([*map(str, arguments)]) == 0
    assert capsys.readouterr().out
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_stats(capsys: pytest.CaptureFixture[str], recorded: tuple[Path, int]) -> None:
    facts = answer(capsys, "stats", recorded[0])
    assert facts["current_bytes"] == 240_000
    assert facts["events"]["failure"] == 1
    assert facts["ended"] is True
    assert facts["notes"] == []


def test_peak_is_summed_by_line(capsys: pytest.CaptureFixture[str], recorded: tuple[Path, int]) -> None:
    facts = answer(capsys, "peak", recorded[0])
    assert facts["peak_bytes"] == facts["held_bytes"] == 240_000 + (8 << 20)
    assert facts["holders"][0]["tag"] == "[red]high"
    assert facts["holders"][0]["site"]["file"] == HERE
    assert main(["peak", str(recorded[0])]) == 0
    assert "test_cli_recording.py" in capsys.readouterr().out.replace("\n", "")


def test_leaks_and_the_limit(capsys: pytest.CaptureFixture[str], recorded: tuple[Path, int]) -> None:
    facts = answer(capsys, "leaks", recorded[0], "--fail-on", "1MiB")
    assert (facts["current_count"], facts["failed"]) == (3, False)
    assert facts["holders"][0]["tag"] == "kept"
    assert main(["leaks", str(recorded[0]), "--fail-on", "240000"]) == 3
    assert "the limit is" in capsys.readouterr().err
    assert main(["leaks", str(recorded[0]), "--fail-on", "240000", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["failed"] is True
    assert main(["leaks", str(recorded[0]), "--fail-on", "many"]) == 2


def test_timeline(capsys: pytest.CaptureFixture[str], recorded: tuple[Path, int]) -> None:
    facts = answer(capsys, "timeline", recorded[0], "--steps", "5")
    assert max(facts["total_bytes"]) == facts["total_bytes"][facts["peak_step"]] == 240_000 + (8 << 20)
    assert facts["total_bytes"][-1] == 240_000
    assert [sum(each) for each in zip(*facts["by_framework"].values(), strict=True)] == facts["total_bytes"]


def test_compare(capsys: pytest.CaptureFixture[str], recorded: tuple[Path, int], tmp_path: Path) -> None:
    more, _ = make(tmp_path / "b.rec", 5)
    facts = answer(capsys, "compare", recorded[0], more, "--at", "end")
    assert [(each["before_bytes"], each["after_bytes"]) for each in facts["lines"]] == [(240_000, 400_000)]
    assert answer(capsys, "compare", recorded[0], recorded[0])["lines"] == []


def test_where(capsys: pytest.CaptureFixture[str], recorded: tuple[Path, int]) -> None:
    path, address = recorded
    facts = answer(capsys, "where", path, hex(address))
    assert [each["bytes"] for each in facts["alive"]] == [80_000]
    assert [each["what"] for each in facts["events"]] == ["allocate"]
    assert main(["where", str(path), "1"]) == 1
    assert main(["where", str(path), "1", "--json"]) == 1
    assert main(["where", str(path), "one"]) == 2


def test_live_of_an_ended_program(capsys: pytest.CaptureFixture[str], recorded: tuple[Path, int]) -> None:
    facts = answer(capsys, "live", recorded[0])
    assert facts["current_bytes"] == 240_000
    assert main(["live", "--once", "1"]) == 1
    assert "does not record" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", [["stats"], ["peak"], ["leaks"], ["timeline"], ["where", "1"], ["compare", "none"], ["live"]]
)
def test_no_recording_is_code_1_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: Sequence[str]
) -> None:
    (tmp_path / "text").write_text("text")
    assert main([verb[0], str(tmp_path / "text"), *verb[1:]]) == 1
    assert "is no recording" in capsys.readouterr().err


def run(folder: Path, *arguments: str, **more: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", "-m", "rmm_managed_bridge", "run", *arguments]
    return subprocess.run(
        command, cwd=folder, env=program_environment(), capture_output=True, text=True, timeout=120, check=False, **more
    )


SCRIPT = """
import sys
import numpy as np
def load():
    return np.ones(1 << 20)
if __name__ == "__main__":
    x = load()
    print(sys.argv, __name__, sys.stdin.read())
    sys.exit(int(sys.argv[1]))
"""


def test_run_passes_a_script_its_arguments_and_its_code_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    done = run(tmp_path, "--backend", "host", "-o", "a.rec", "--json", "program.py", "3", "--json", input="read")
    assert done.returncode == 3, done.stderr
    assert done.stdout == "['program.py', '3', '--json'] __main__ read\n"
    facts = json.loads(done.stderr.splitlines()[-1])
    assert (facts["exit_code"], facts["file"]) == (3, str(tmp_path / "a.rec"))
    assert facts["peak_lines"][0]["site"] == {"file": "program.py", "line": 5, "function": "load"}
    assert facts["peak_lines"][0]["bytes"] >= 8 << 20


def test_run_of_a_module_and_of_text(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    done = run(tmp_path, "-o", "m.rec", "-m", "program", "0", input="")
    assert done.returncode == 0, done.stderr
    assert "'0'] __main__" in done.stdout
    done = run(tmp_path, "-o", "c.rec", "-c", "import numpy as np; x = np.ones(1000); print(x.sum())")
    assert (done.returncode, done.stdout) == (0, "1000.0\n"), done.stderr
    assert "recorded in" in done.stderr.splitlines()[-1]
    assert {"c.rec", "m.rec"} <= {path.name for path in tmp_path.iterdir()}


def test_run_of_a_program_that_fails_or_dies(tmp_path: Path) -> None:
    done = run(tmp_path, "-o", "a.rec", "-c", "1 / 0")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "child.py" not in done.stderr
    code = "import os, numpy as np; x = np.ones(1 << 20); os.kill(os.getpid(), 9)"
    done = run(tmp_path, "-o", "b.rec", "--json", "-c", code)
    assert done.returncode == 128 + signal.SIGKILL
    facts = json.loads(done.stderr.splitlines()[-1])
    assert (facts["signal"], facts["current_bytes"]) == (9, 8 << 20)
    done = run(tmp_path, "-o", "a.rec", "-c", "print('never')")
    assert (done.returncode, done.stdout) == (1, "")
    assert "it exists" in done.stderr
    assert done.stderr.splitlines()[-1] == f"rmm-bridge: no recording: {tmp_path / 'a.rec'} is another program's"
    assert run(tmp_path).returncode == 2


def test_run_hands_on_what_install_is_asked_for(tmp_path: Path) -> None:
    code = "import numpy as np; np.ones(100 << 20, 'u1')"
    done = run(tmp_path, "-o", "a.rec", "--backend", "host", "--maximum-pool-size", "64MiB", "-c", code)
    assert done.returncode == 1
    assert "at most 64.0 MiB" in done.stderr
    done = run(tmp_path, "-o", "b.rec", "--maximum-pool-size", "64 apples", "-c", "print('never')")
    assert done.returncode != 0
    assert "64 apples" in done.stderr


def test_live_of_a_running_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = f"""
import sys, numpy as np, rmm_managed_bridge as bridge
bridge.install("host")
bridge.record({str(tmp_path / "a.rec")!r}, size="4MiB")
x = np.ones(12_345)
print("go", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,  # not the checkout, which has no native modules where a wheel is tested
        env=program_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        assert main(["live", str(process.pid), "--once"]) == 0
        assert f"process {process.pid} runs" in capsys.readouterr().out
        facts = answer(capsys, "live", tmp_path / "a.rec", "--once")
        assert (facts["pid"], facts["ended"], facts["current_bytes"]) == (process.pid, False, 12_345 * 8)
        process.communicate()
