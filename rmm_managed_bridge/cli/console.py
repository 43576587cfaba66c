"""The console that verbs print to."""

import sys

from rich.console import Console

__all__ = ["make_console"]

# Tables keep their columns in a file or a pipe, which rich would take for 80 columns.
_WIDTH_WITHOUT_TERMINAL = 120


def make_console() -> Console:
    """Return a console on standard output that prints text as it is: no markup, no guessed highlights."""
    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(width=width, markup=False, highlight=False)
