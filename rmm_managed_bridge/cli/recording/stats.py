"""`rmm-bridge stats`: what a recording is of, and its sums."""

from collections import Counter
from pathlib import Path

import click
import numpy as np

from rmm_managed_bridge.cli.recording.common import (
    file_argument,
    json_option,
    say_json,
    say_notes,
    say_table,
    state_of,
)
from rmm_managed_bridge.recordings import Content, read
from rmm_managed_bridge.recordings.layout import ACTIONS, ALLOCATE
from rmm_managed_bridge.units import format_bytes

__all__ = ["stats"]


@click.command()
@file_argument
@json_option
def stats(file: Path, as_json: bool) -> None:
    """Show what a recording is of, and its sums."""
    content = read(file)
    facts = _facts(content)
    if as_json:
        say_json(facts)
        return
    pairs = {
        "program": " ".join(map(str, _list(content.names.about.get("arguments")))) or "unknown",
        "process": f"{content.header.pid}, {state_of(content)}",
        "recorded": f"{facts['seconds']:.3f} s",
        "live": f"{format_bytes(content.current_bytes)} in {len(content.blocks)}",
        "peak": format_bytes(content.peak.current_bytes),
        "allocated": f"{format_bytes(int(str(facts['allocated_bytes'])))} while events were kept",
        "events": f"{len(content.events)} kept, {content.forgotten_count} forgotten",
        **{f"  {name}": str(number) for name, number in _by_action(content).items()},
    }
    say_table(str(file), ("", ""), pairs.items())
    say_notes(content)


def _facts(content: Content) -> dict[str, object]:
    allocated = content.events[content.events["action"] == ALLOCATE]
    times = content.times_ns(content.events["order"][-1:])
    return {
        "file": str(content.path),
        "pid": content.header.pid,
        "about": content.names.about,
        "ended": content.ended,
        "seconds": int(times[0]) / 1e9 if len(times) else 0.0,
        "current_bytes": content.current_bytes,
        "current_count": len(content.blocks),
        "peak_bytes": content.peak.current_bytes,
        "peak_is_kept": content.peak_is_kept,
        "allocated_bytes": int(allocated["bytes"].sum(dtype=np.uint64)),
        "event_count": len(content.events),
        "forgotten_count": content.forgotten_count,
        "events": _by_action(content),
        "notes": list(content.notes),
    }


def _by_action(content: Content) -> dict[str, int]:
    counts = Counter(content.events["action"].tolist())
    return {
        ACTIONS[number] if number < len(ACTIONS) else f"action {number}": count
        for number, count in sorted(counts.items())
    }


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
