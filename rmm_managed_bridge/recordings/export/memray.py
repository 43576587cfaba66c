"""memray's own capture file, so that all its reports open it.

memray has no public writer. It ships a class around its own for its tests, whose arguments are looked at here for the
versions named; for others this refuses.
"""

import re
from importlib import metadata
from pathlib import Path
from typing import Any

from rmm_managed_bridge.errors import BridgeError
from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.export.steps import Step, steps

_VERSIONS = ((1, 20),)
_FREE, _MALLOC = 5, 6  # of memray's allocators: it knows no other


def write(content: Content, path: Path) -> None:
    """Write all allocations and frees. A stack is the line, and around it framework and tag.

    Raises
    ------
    BridgeError
        If memray is missing, or of a version that is not known here.
    """
    out = _writer(path)
    for number in sorted(
        {int(thread) for thread in content.moves["thread"]} | {int(b) for b in content.blocks["thread"]}
    ):
        out.write_thread_record(number, content.names.threads.get(number) or f"thread {number}")
    stacks = _Stacks(out, content)
    for step in steps(content):
        stacks.enter(step)
        out.write_allocation_record(
            step.thread, step.ptr, step.size_bytes if step.comes else 0, _MALLOC if step.comes else _FREE
        )
    for time_ms, size in _totals(content):
        out.write_memory_record(time_ms, size)
    out.write_trailer()
    out.write_header(True)


class _Stacks:
    """Which frames memray has been told of, in all and for each thread now."""

    def __init__(self, out: Any, content: Content) -> None:
        self._out = out
        self._names = content.names
        self._codes: dict[tuple[str, str, int], int] = {}
        self._now: dict[int, tuple[int, int, int]] = {}
        # A function in one line: every instruction of it is on the first.
        self._line_table = out.get_linetable((lambda: None).__code__)

    def enter(self, step: Step) -> None:
        where = (step.framework, step.tag, step.site)
        before = self._now.get(step.thread)
        if before == where:
            return
        if before is not None:
            self._out.write_frame_pop(step.thread, 2)
        tag, site = self._names.tag(step.tag), self._names.site(step.site)
        framework = self._names.framework(step.framework)
        self._push(step.thread, f"{framework}, tag {tag}" if tag else framework, "rmm_managed_bridge", 1)
        self._push(step.thread, site.function or site.file, site.file, max(site.line, 1))
        self._now[step.thread] = where

    def _push(self, thread: int, function: str, file: str, line: int) -> None:
        key = (_plain(function), _plain(file), line)
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = len(self._codes) + 1
            self._out.write_code_object(code, key[0], key[1], self._line_table, line)
        self._out.write_frame_push(thread, code, 0, True)


def _writer(path: Path) -> Any:
    try:
        version = metadata.version("memray")
    except metadata.PackageNotFoundError:
        raise BridgeError("export -f memray needs memray: pip install 'memray==1.20.*'") from None
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) not in _VERSIONS:
        raise BridgeError(
            "export -f memray writes memray's own format, which is not public: it knows memray 1.20, and this is "
            f"{version}; pip install 'memray==1.20.*', or export to another format"
        )
    from memray._memray import RecordWriterTestHarness

    return RecordWriterTestHarness(str(path), command_line="recorded by rmm_managed_bridge")


def _totals(content: Content) -> list[tuple[int, int]]:
    """Return (milliseconds since the epoch, live bytes), which memray draws as resident memory."""
    from rmm_managed_bridge.recordings.over_time import over_time

    found = over_time(content, 1000)
    start = max(content.header.start_time_ns, 0) // 10**6
    return [
        (start + int(time * 1000), max(size, 0)) for time, size in zip(found.times_s, found.total_bytes, strict=True)
    ]


def _plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
