"""What the verbs about recordings share: their arguments, and the two forms of an answer."""

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from rmm_managed_bridge.recordings import Content, by_line
from rmm_managed_bridge.records import CallSite, Holder
from rmm_managed_bridge.reports.text import shorten_left
from rmm_managed_bridge.units import format_bytes

LIMIT_FAILED = 3
_SITE_WIDTH = 48
Verb = TypeVar("Verb", bound=Callable[..., Any])

file_argument = click.argument("file", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
count_option = click.option(
    "-n", "--count", type=click.IntRange(1), default=20, show_default=True, help="Lines to show."
)


def say_json(facts: object) -> None:
    """Print what the verb found, for programs."""
    click.echo(json.dumps(facts, indent=2))


def say_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, for people. Columns whose name begins with ``>`` are numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from rmm_managed_bridge.cli.console import make_console

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE)
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">"), justify=justify, overflow="fold", no_wrap=name == "line")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    make_console().print(table)


def say_notes(content: Content) -> None:
    """Print on standard error what of the file is not whole."""
    for note in content.notes:
        click.echo(f"{content.path}: {note}", err=True)


def site_fact(site: CallSite) -> dict[str, object]:
    """Return a line of a program for JSON."""
    return {"file": site.file, "line": site.line, "function": site.function}


def holder_fact(holder: Holder) -> dict[str, object]:
    """Return a holder for JSON."""
    return {
        "bytes": holder.current_bytes,
        "count": holder.current_count,
        "framework": holder.framework,
        "tag": holder.tag,
        "site": site_fact(holder.site),
        "device": holder.device,
        "kind": holder.kind,
    }


def lines_table(title: str, holders: Sequence[Holder], total_bytes: int, count: int) -> None:
    """Print who holds what, summed by line."""
    lines = by_line(list(holders))
    rows = [
        (
            format_bytes(size),
            _share(size, total_bytes),
            str(blocks),
            who,
            short_site(site),
            site.function,
        )
        for site, who, size, blocks in lines[:count]
    ]
    if len(lines) > count:
        rest = sum(size for _, _, size, _ in lines[count:])
        rows.append((format_bytes(rest), _share(rest, total_bytes), "", "", f"and {len(lines) - count} more lines", ""))
    say_table(title, (">size", ">share", ">count", "framework", "line", "function"), rows)


def short_site(site: CallSite) -> str:
    """Return a line of a program as a cell of a table: a long path loses its beginning."""
    return shorten_left(str(site), _SITE_WIDTH)


def line_facts(holders: Iterable[Holder], count: int) -> list[dict[str, object]]:
    """Return who holds what for JSON, summed by line."""
    return [
        {"site": site_fact(site), "frameworks": who, "bytes": size, "count": blocks}
        for site, who, size, blocks in by_line(list(holders))[:count]
    ]


def state_of(content: Content) -> str:
    """Return how the program stood when the file was read."""
    if content.ended:
        return "ended"
    if content.names.about.get("host") != platform.node():
        return "was killed, or runs on another host"
    return "runs" if Path(f"/proc/{content.header.pid}").exists() else "was killed"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
