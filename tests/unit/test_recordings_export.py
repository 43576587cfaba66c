"""Each format as its own readers take it, with the recording's sums to the byte."""

import csv
import gzip
import json
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rmm_managed_bridge as bridge
from rmm_managed_bridge.cli.main import main
from rmm_managed_bridge.recordings import Content, read
from rmm_managed_bridge.recordings.export import FORMATS
from rmm_managed_bridge.recordings.export.steps import steps

LONG = "sehr_lang_" * 15 + "ßпривет"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record blocks from before, temporaries, resizes, nested and long tags, and what stays."""
    path = tmp_path_factory.mktemp("recorded") / "a.rec"
    with bridge.installed("host"):
        before = [np.empty(1000 + number) for number in range(3)]
        with bridge.record(path, size="4MiB"):
            before.pop(0)
            kept = []
            for number in range(200):
                with bridge.tag("outer; with"), bridge.tag(f"{LONG}{number % 3}"):
                    kept.append(np.empty(100 * number + 1))
                if number % 2:
                    kept.pop(number % 7 % len(kept))
                if number % 5 == 0:
                    kept[-1].resize(3000 + number, refcheck=False)
            high = np.empty(1 << 20)
            del high
        del before, kept
    return path


@pytest.fixture(scope="module")
def content(recorded: Path) -> Content:
    return read(recorded)


def made(recorded: Path, tmp_path: Path, name: str) -> Path:
    out = tmp_path / f"made{FORMATS[name].suffix}"
    assert main(["export", str(recorded), "-f", name, "-o", str(out)]) == 0
    return out


def heights(changes: Iterator[tuple[bool, int, int]]) -> tuple[int, int]:
    """Return (peak, end) of (comes, address, bytes), each free of which must be of what is there."""
    there: dict[int, int] = {}
    now = peak = 0
    for comes, address, size in changes:
        if comes:
            assert address not in there
            there[address] = size
            now += size
            peak = max(peak, now)
        else:
            assert there.pop(address) == size
            now -= size
    return peak, now


def test_steps_are_what_happened(content: Content) -> None:
    found = heights((step.comes, step.ptr, step.size_bytes) for step in steps(content))
    assert found == (content.kept_peak_bytes, content.current_bytes)


def test_collapsed(recorded: Path, content: Content, tmp_path: Path) -> None:
    lines = made(recorded, tmp_path, "collapsed").read_text(encoding="utf-8").splitlines()
    sums = [line.rsplit(" ", 1) for line in lines]
    assert sum(int(size) for _, size in sums) == content.peak.current_bytes
    assert all(stack.split(";")[0] == "numpy" for stack, _ in sums)
    assert any(f"tag outer, with;tag {LONG}1;" in stack for stack, _ in sums)


def test_speedscope(recorded: Path, content: Content, tmp_path: Path) -> None:
    document = json.loads(made(recorded, tmp_path, "speedscope").read_text(encoding="utf-8"))
    frames = document["shared"]["frames"]
    for profile, total in zip(document["profiles"], (content.peak.current_bytes, content.current_bytes), strict=True):
        assert (profile["type"], profile["unit"], profile["startValue"]) == ("sampled", "bytes", 0)
        assert sum(profile["weights"]) == profile["endValue"] == total
        assert len(profile["samples"]) == len(profile["weights"])
        assert all(0 <= frame < len(frames) for sample in profile["samples"] for frame in sample)
    assert any(frame["name"] == f"tag {LONG}2" for frame in frames)


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protocol buffer's message."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            assert key & 7 == 2
            size = varint()
            yield key >> 3, data[place : place + size]
            place += size


def packed(data: bytes) -> list[int]:
    numbers, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(value)
            value = shift = 0
    return numbers


def test_pprof(recorded: Path, content: Content, tmp_path: Path) -> None:
    profile = list(fields(gzip.decompress(made(recorded, tmp_path, "pprof").read_bytes())))
    strings = [value.decode() for field, value in profile if field == 6]
    assert strings[0] == ""
    kinds = [tuple(strings[number] for _, number in fields(value)) for field, value in profile if field == 1]
    assert kinds == [
        ("peak_objects", "count"),
        ("peak_space", "bytes"),
        ("inuse_objects", "count"),
        ("inuse_space", "bytes"),
    ]
    samples = [dict(fields(value)) for field, value in profile if field == 2]
    sums = [sum(each) for each in zip(*(packed(sample[2]) for sample in samples), strict=True)]
    assert sums[1] == content.peak.current_bytes
    assert sums[2:] == [len(content.blocks), content.current_bytes]
    locations = {dict(fields(value))[1]: dict(fields(value)) for field, value in profile if field == 4}
    functions = {dict(fields(value))[1]: dict(fields(value)) for field, value in profile if field == 5}
    names = set()
    for sample in samples:
        stack = [dict(fields(locations[number][4])) for number in packed(sample[1])]
        names |= {strings[functions[line[1]][2]] for line in stack}
        assert strings[functions[stack[-1][1]][2]] == "numpy"
    assert {f"tag {LONG}0", "recorded"} <= names
    assert strings[dict(profile)[14]] == "peak_space"


def test_json(recorded: Path, content: Content, tmp_path: Path) -> None:
    document = json.loads(made(recorded, tmp_path, "json").read_text(encoding="utf-8"))
    assert sum(block["requested_bytes"] for block in document["alive"]) == content.current_bytes
    assert sum(holder["current_bytes"] for holder in document["peak_holders"]) == document["peak_bytes"]
    assert {len(column) for column in document["events"].values()} == {len(content.events)}
    assert Counter(document["events"]["action"])["resize"] == 40


def test_csv_of_rmm(recorded: Path, content: Content, tmp_path: Path) -> None:
    with made(recorded, tmp_path, "csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["Thread", "Time", "Action", "Pointer", "Size", "Stream"]
    found = heights((row["Action"] == "allocate", int(row["Pointer"], 16), int(row["Size"])) for row in rows)
    assert found == (content.kept_peak_bytes, content.current_bytes)


def test_perfetto(recorded: Path, content: Content, tmp_path: Path) -> None:
    events = json.loads(made(recorded, tmp_path, "perfetto").read_text(encoding="utf-8"))["traceEvents"]
    live = [event["args"]["bytes"] for event in events if event["name"] == "live bytes"]
    by_framework = [sum(event["args"].values()) for event in events if event["name"] == "live bytes by framework"]
    assert live == by_framework
    assert (max(live), live[-1]) == (content.kept_peak_bytes, content.current_bytes)
    times = [event["ts"] for event in events if event["ph"] == "C"]
    assert times == sorted(times)


def test_torch(recorded: Path, content: Content, tmp_path: Path) -> None:
    document = pickle.loads(made(recorded, tmp_path, "torch").read_bytes())
    assert sum(segment["active_size"] for segment in document["segments"]) == content.current_bytes
    trace = [each for each in document["device_traces"][0] if each["action"] != "free_requested"]
    found = heights((each["action"] == "alloc", each["addr"], each["size"]) for each in trace)
    assert found == (content.kept_peak_bytes, content.current_bytes)


def test_torchs_own_viewer_takes_it(recorded: Path, tmp_path: Path) -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    document = pickle.loads(made(recorded, tmp_path, "torch").read_bytes())
    assert "TOTAL MEM" in viewer.trace(document)
    assert "total_allocated" in viewer.segsum(document)
    assert "MemoryViz" in viewer.trace_plot(document)
    assert "MemoryViz" in viewer.segment_plot(document)


def test_memray_takes_it(recorded: Path, content: Content, tmp_path: Path) -> None:
    memray = pytest.importorskip("memray")
    out = made(recorded, tmp_path, "memray")
    with memray.FileReader(str(out)) as reader:
        assert (
            sum(each.size for each in reader.get_leaked_allocation_records(merge_threads=True)) == content.current_bytes
        )
        high = list(reader.get_high_watermark_allocation_records(merge_threads=True))
        assert sum(each.size for each in high) == content.kept_peak_bytes
        assert reader.metadata.peak_memory == content.kept_peak_bytes
        stack = max(high, key=lambda each: each.size).stack_trace()
    assert (stack[0][0], stack[0][1]) == ("recorded", __file__)
    assert "high = np.empty" in Path(__file__).read_text(encoding="utf-8").splitlines()[stack[0][2] - 1]
    for report in (
        ["stats"],
        ["summary"],
        ["flamegraph", "--temporal", "-o", str(tmp_path / "a.html")],
        ["table", "--leaks", "-o", str(tmp_path / "b.html")],
        ["transform", "csv", "-o", str(tmp_path / "c.csv")],
    ):
        command = [sys.executable, "-m", "memray", *report, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", [None, "1.18.0", "1.21.0", "2.0", "odd"])
def test_memray_of_another_version_is_refused(
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str | None,
) -> None:
    def told(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", told)
    assert main(["export", str(recorded), "-f", "memray", "-o", str(tmp_path / "a")]) == 1
    assert "memray==1.20" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_over_only_if_asked(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    out.write_text("precious")
    assert main(["export", str(recorded), "-f", "json", "-o", str(out)]) == 1
    assert out.read_text() == "precious"
    assert main(["export", str(recorded), "-f", "json", "-o", str(out), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(out)
    assert json.loads(out.read_text())["version"] == 1
    assert main(["export", str(recorded), "-f", "unknown"]) == 2
