"""Renderables and paths as plain text."""

import io
import re
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

__all__ = ["SiteText", "format_site", "shorten_left", "to_text"]

_SEPARATOR = re.compile(r"[/\\]")
_ELLIPSIS = "…"
_LEAST_SITE_WIDTH = 12


def to_text(renderable: RenderableType, width: int = 100) -> str:
    """Return what `renderable` looks like on a terminal `width` columns wide, without colours or trailing blanks.

    Parameters
    ----------
    renderable
        Anything that rich can print, such as the tables of :mod:`rmm_managed_bridge.reports.tables`.
    width
        Columns that a line may take.
    """
    stream = io.StringIO()
    # Said outright, because the environment (FORCE_COLOR, COLUMNS) would decide otherwise.
    Console(file=stream, width=width, color_system=None, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def shorten_left(text: str, width: int) -> str:
    """Return `text` in at most `width` characters, cut from the left, where possible in front of a path separator.

    The end of a path says most about it: ``/srv/projects/sim/main.py:9`` becomes ``…/sim/main.py:9``.
    """
    if width < 2:
        raise ValueError(f"width={width} leaves no room for text; use 2 or more")
    if len(text) <= width:
        return text
    kept = text[len(text) - (width - 1) :]
    separator = _SEPARATOR.search(kept)
    # A separator far to the right would throw away most of a long file name that could have been shown.
    if separator and separator.start() < len(kept) // 2:
        kept = kept[separator.start() :]
    return _ELLIPSIS + kept


def format_site(file: str, line: int, width: int) -> str:
    """Return ``file:line`` in at most `width` characters; the line number, 0 for none, is never cut."""
    suffix = f":{line}" if line else ""
    return shorten_left(file, max(2, width - len(suffix))) + suffix


@dataclass(frozen=True)
class SiteText:
    """``file:line`` in a table: as wide as it likes up to `width`, cut from the left where the table has less room.

    Rich alone would cut from the right, and lose the name of the file and the line.
    """

    file: str
    line: int
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(format_site(self.file, self.line, min(self.width, options.max_width)), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = min(len(format_site(self.file, self.line, self.width)), options.max_width)
        return Measurement(min(_LEAST_SITE_WIDTH, widest), widest)
