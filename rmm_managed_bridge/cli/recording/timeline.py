"""`rmm-bridge timeline`: memory over time, as rows of text."""

from pathlib import Path

import click

from rmm_managed_bridge.cli.recording.common import file_argument, json_option, say_json, say_notes, say_table
from rmm_managed_bridge.recordings import read
from rmm_managed_bridge.recordings.over_time import over_time
from rmm_managed_bridge.units import format_bytes

__all__ = ["timeline"]

_WIDTH = 50


@click.command()
@file_argument
@click.option("--steps", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Moments to show.")
@json_option
def timeline(file: Path, steps: int, as_json: bool) -> None:
    """Show memory over time: of each stretch the moment at which the most was alive."""
    content = read(file)
    found = over_time(content, steps)
    if as_json:
        say_json(
            {
                "seconds": found.times_s,
                "total_bytes": found.total_bytes,
                "by_framework": found.by_framework,
                "peak_step": found.peak_step,
                "forgotten_count": content.forgotten_count,
                "notes": list(content.notes),
            }
        )
        return
    highest = max(found.total_bytes) or 1
    rows = [
        (
            f"{time:.3f}",
            format_bytes(size),
            "█" * round(size / highest * _WIDTH) + (" peak" if step == found.peak_step else ""),
            ", ".join(f"{name} {format_bytes(heights[step])}" for name, heights in found.by_framework.items()),
        )
        for step, (time, size) in enumerate(zip(found.times_s, found.total_bytes, strict=True))
    ]
    say_table(str(file), (">seconds", ">live", "", "of these"), rows)
    if content.forgotten_count:
        click.echo(f"Before that, {content.forgotten_count} events were forgotten; record with a larger size.")
    say_notes(content)
