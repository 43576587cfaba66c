"""`rmm-bridge live`: follow a program that records, by its file."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rmm_managed_bridge.cli.recording.common import json_option, line_facts, say_json, short_site, state_of
from rmm_managed_bridge.errors import BridgeError
from rmm_managed_bridge.recordings import Content, by_line, read
from rmm_managed_bridge.recordings.layout import MAGIC
from rmm_managed_bridge.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["live"]


@click.command()
@click.argument("what", metavar="PID_OR_FILE")
@click.option("--interval", type=click.FloatRange(0.05), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Show it once, and end.")
@json_option
def live(what: str, interval: float, once: bool, as_json: bool) -> None:
    """Show what a running program holds, again and again until it ends. With --json once."""
    path = _file_of(int(what)) if what.isdigit() and not Path(what).exists() else Path(what)
    content = read(path, with_events=False)
    if as_json:
        lines = line_facts(content.holders(content.blocks), 100)
        say_json(
            {
                "file": str(path),
                "pid": content.header.pid,
                "ended": content.ended,
                "current_bytes": content.current_bytes,
                "peak_bytes": content.header.peak_bytes,
                "lines": lines,
                "notes": list(content.notes),
            }
        )
        return
    from rich.live import Live

    from rmm_managed_bridge.cli.console import make_console

    console = make_console()
    if once:
        console.print(_picture(content))
        return
    with Live(_picture(content), console=console, auto_refresh=False) as shown:
        while not content.ended and Path(f"/proc/{content.header.pid}").exists():
            time.sleep(interval)
            content = read(path, with_events=False)
            shown.update(_picture(content), refresh=True)


def _file_of(pid: int) -> Path:
    """Return the recording that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise BridgeError(
            f"process {pid} does not record, or is not yours to look at ({error.strerror}); name its file instead"
        ) from None
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and "s" in parts[1] and parts[5].startswith("/"):
            try:
                with Path(parts[5]).open("rb") as file:
                    if file.read(len(MAGIC)) == MAGIC:
                        return Path(parts[5])
            except OSError:
                continue
    raise BridgeError(f"process {pid} does not record; start it with `rmm-bridge run` or RMM_BRIDGE_RECORD=file")


def _picture(content: Content) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = f"process {content.header.pid} {state_of(content)}: {format_bytes(content.current_bytes)} live"
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE)
    for name in ("size", "count", "framework", "line", "function"):
        table.add_column(name, justify="right" if name in ("size", "count") else "left", overflow="fold")
    for site, frameworks, size, count in by_line(content.holders(content.blocks))[:20]:
        table.add_row(format_bytes(size), str(count), Text(frameworks), Text(short_site(site)), Text(site.function))
    return table
