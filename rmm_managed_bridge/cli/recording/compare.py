"""`rmm-bridge compare`: which lines hold more in one recording than in another."""

from collections.abc import Sequence
from pathlib import Path

import click

from rmm_managed_bridge.cli.recording.common import (
    count_option,
    json_option,
    say_json,
    say_notes,
    say_table,
    short_site,
    site_fact,
)
from rmm_managed_bridge.recordings import by_line, read
from rmm_managed_bridge.records import CallSite, Holder
from rmm_managed_bridge.units import format_bytes

__all__ = ["compare"]

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("before", type=_PATH)
@click.argument("after", type=_PATH)
@click.option("--at", type=click.Choice(["peak", "end"]), default="peak", show_default=True, help="Which moment.")
@count_option
@json_option
def compare(before: Path, after: Path, at: str, count: int, as_json: bool) -> None:
    """Show by line how much more AFTER held than BEFORE, at the peak or at the end."""
    contents = read(before), read(after)
    if at == "peak":
        first, second = (list(content.peak.holders) for content in contents)
        totals = [content.peak.current_bytes for content in contents]
    else:
        first, second = (content.holders(content.blocks) for content in contents)
        totals = [content.current_bytes for content in contents]
    changes = _changes(first, second)
    if as_json:
        say_json(
            {
                "at": at,
                "before_bytes": totals[0],
                "after_bytes": totals[1],
                "lines": [
                    {"site": site_fact(site), "before_bytes": was, "after_bytes": now}
                    for site, was, now in changes[:count]
                ],
                "notes": [note for content in contents for note in content.notes],
            }
        )
        return
    rows = [
        (_signed(now - was), format_bytes(was), format_bytes(now), short_site(site), site.function)
        for site, was, now in changes[:count]
    ]
    title = f"at the {at}: {format_bytes(totals[0])}, then {format_bytes(totals[1])}"
    say_table(title, (">change", ">before", ">after", "line", "function"), rows)
    for content in contents:
        say_notes(content)


def _changes(first: Sequence[Holder], second: Sequence[Holder]) -> list[tuple[CallSite, int, int]]:
    was = {site: size for site, _, size, _ in by_line(list(first))}
    now = {site: size for site, _, size, _ in by_line(list(second))}
    changes = [(site, was.get(site, 0), now.get(site, 0)) for site in {**was, **now}]
    return sorted((each for each in changes if each[1] != each[2]), key=lambda each: -abs(each[2] - each[1]))


def _signed(size_bytes: int) -> str:
    return f"{'+' if size_bytes > 0 else '-'}{format_bytes(abs(size_bytes))}"
