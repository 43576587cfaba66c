"""`rmm-bridge peak`: who held what when the most was alive."""

from pathlib import Path

import click

from rmm_managed_bridge.cli.recording.common import (
    count_option,
    file_argument,
    holder_fact,
    json_option,
    lines_table,
    say_json,
    say_notes,
)
from rmm_managed_bridge.recordings import read
from rmm_managed_bridge.units import format_bytes

__all__ = ["peak"]


@click.command()
@file_argument
@count_option
@json_option
def peak(file: Path, count: int, as_json: bool) -> None:
    """Show who held what when the most was alive, summed by line."""
    content = read(file)
    found = content.peak
    if as_json:
        say_json(
            {
                "peak_bytes": found.current_bytes,
                "held_bytes": sum(holder.current_bytes for holder in found.holders),
                "is_kept": content.peak_is_kept,
                "holders": [holder_fact(holder) for holder in found.holders[:count]],
                "notes": list(content.notes),
            }
        )
        return
    lines_table(f"peak of {format_bytes(found.current_bytes)}", found.holders, found.current_bytes, count)
    off = found.current_bytes - sum(holder.current_bytes for holder in found.holders)
    if off:
        click.echo(f"The lines add up to {format_bytes(abs(off))} {'less' if off > 0 else 'more'} than the peak.")
    if not content.peak_is_kept:
        click.echo("The events of that time are forgotten: this is what the ledger wrote down.")
    say_notes(content)
