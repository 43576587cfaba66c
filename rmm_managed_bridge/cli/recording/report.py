"""`rmm-bridge report`: a recording as one page of HTML."""

from pathlib import Path

import click

from rmm_managed_bridge.cli.recording.common import file_argument, json_option, say_json, say_notes
from rmm_managed_bridge.cli.recording.output import new_file
from rmm_managed_bridge.recordings import read
from rmm_managed_bridge.recordings.report import report_page

__all__ = ["report"]


@click.command()
@file_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), help="FILE with the ending .html by default.")
@click.option("--force", is_flag=True, help="Write over a file that exists.")
@json_option
def report(file: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Write one page of HTML that loads nothing: memory over time, a flame graph of the peak, who held what."""
    content = read(file)
    path = output or file.with_suffix(".html")
    text = report_page(content)
    with new_file(path, force=force) as out:
        out.write(text.encode("utf-8", "replace"))
    if as_json:
        say_json({"output": str(path), "notes": list(content.notes)})
    else:
        click.echo(str(path))
        say_notes(content)
