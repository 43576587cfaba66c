"""A recording in the formats of other tools: one small file each, whose sums are the recording's to the byte."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.export import (
    collapsed,
    csv,
    json,
    memray,
    perfetto,
    pprof,
    speedscope,
    torch,
)

__all__ = ["FORMATS", "Format"]


class Format(NamedTuple):
    """How to write one format, and for whom it is. `write` takes a path that does not exist."""

    suffix: str
    write: Callable[[Content, Path], None]
    reader: str


FORMATS: dict[str, Format] = {
    "collapsed": Format(".collapsed", collapsed.write, "flamegraph.pl, speedscope: what was held at the peak"),
    "speedscope": Format(".speedscope.json", speedscope.write, "speedscope.app: the peak, and the end"),
    "pprof": Format(".pb.gz", pprof.write, "pprof, Perfetto, Pyroscope: the peak, and the end"),
    "json": Format(".json", json.write, "programs: all there is"),
    "csv": Format(".csv", csv.write, "RMM's replay benchmark: its own log of allocations"),
    "perfetto": Format(".perfetto.json", perfetto.write, "ui.perfetto.dev, chrome://tracing: memory over time"),
    "torch": Format(".pickle", torch.write, "PyTorch's memory_viz"),
    "memray": Format(".memray", memray.write, "memray 1.20: all its reports"),
}
