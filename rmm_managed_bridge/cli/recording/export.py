"""`rmm-bridge export`: a recording in the format of another tool."""

import shutil
import tempfile
from pathlib import Path

import click

from rmm_managed_bridge.cli.recording.common import file_argument, json_option, say_json, say_notes
from rmm_managed_bridge.cli.recording.output import new_file
from rmm_managed_bridge.recordings import read
from rmm_managed_bridge.recordings.export import FORMATS

__all__ = ["export"]


@click.command(epilog="".join(f"\b\n{name}: {each.reader}\n" for name, each in FORMATS.items()))
@file_argument
@click.option("-f", "--format", "name", type=click.Choice(list(FORMATS)), required=True, help="For which tool.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="FILE with another ending by default.")
@click.option("--force", is_flag=True, help="Write over a file that exists.")
@json_option
def export(file: Path, name: str, output: Path | None, force: bool, as_json: bool) -> None:
    """Write a recording as another tool reads it."""
    content = read(file)
    path = output or file.with_suffix(FORMATS[name].suffix)
    # Elsewhere first: what fails leaves nothing, and nobody reads a half.
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "export"
        FORMATS[name].write(content, whole)
        with whole.open("rb") as made, new_file(path, force=force) as out:
            shutil.copyfileobj(made, out)
    if as_json:
        say_json({"output": str(path), "format": name, "notes": list(content.notes)})
    else:
        click.echo(str(path))
        say_notes(content)
