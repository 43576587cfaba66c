"""The log that RMM's ``LoggingResourceAdaptor`` writes, for what reads that."""

import time
from pathlib import Path

from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.export.steps import steps


def write(content: Content, path: Path) -> None:
    """Write a line for each allocation and free. Blocks from before come first."""
    start = content.header.start_time_ns
    with path.open("w", encoding="utf-8") as out:
        out.write("Thread,Time,Action,Pointer,Size,Stream\n")
        for step in steps(content):
            seconds, rest_ns = divmod(max(start + step.time_ns, 0), 10**9)
            clock = time.strftime("%H:%M:%S", time.gmtime(seconds % 86400))
            action = "allocate" if step.comes else "free"
            when = f"{clock}.{rest_ns // 1000:06}"
            out.write(f"{step.thread},{when},{action},{step.ptr:#x},{step.size_bytes},{step.stream:#x}\n")
