"""`rmm-bridge leaks`: what was alive at the end, or is alive now."""

from pathlib import Path

import click

from rmm_managed_bridge.cli.recording.common import (
    LIMIT_FAILED,
    count_option,
    file_argument,
    holder_fact,
    json_option,
    lines_table,
    say_json,
    say_notes,
    state_of,
)
from rmm_managed_bridge.errors import ConfigError
from rmm_managed_bridge.recordings import read
from rmm_managed_bridge.units import format_bytes, parse_bytes

__all__ = ["leaks"]


@click.command()
@file_argument
@click.option("--fail-on", metavar="BYTES", help='End with code 3 if so much or more is alive: 1000, "64MiB".')
@count_option
@json_option
def leaks(file: Path, fail_on: str | None, count: int, as_json: bool) -> int:
    """Show what was alive at the end, summed by line; of a program that runs or was killed, what was alive last."""
    try:
        limit_bytes = None if fail_on is None else parse_bytes(fail_on, "--fail-on")
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    content = read(file)
    holders = content.holders(content.blocks)
    failed = limit_bytes is not None and content.current_bytes >= limit_bytes
    if as_json:
        say_json(
            {
                "current_bytes": content.current_bytes,
                "current_count": len(content.blocks),
                "ended": content.ended,
                "limit_bytes": limit_bytes,
                "failed": failed,
                "holders": [holder_fact(holder) for holder in holders[:count]],
                "notes": list(content.notes),
            }
        )
        return LIMIT_FAILED if failed else 0
    title = f"{format_bytes(content.current_bytes)} alive in {len(content.blocks)}; the program {state_of(content)}"
    lines_table(title, holders, content.current_bytes, count)
    say_notes(content)
    if failed and limit_bytes is not None:
        click.echo(
            f"rmm-bridge: {format_bytes(content.current_bytes)} alive at the end, and the limit is "
            f"{format_bytes(limit_bytes)}",
            err=True,
        )
    return LIMIT_FAILED if failed else 0
