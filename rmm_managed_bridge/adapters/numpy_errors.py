"""Who holds the memory, as a note on NumPy's own `MemoryError`.

NumPy raises an exception of its own class, with its own text, long after the pool refused. While the bridge is
installed, that class's ``__init__`` is wrapped, and adds what the pool says (PEP 678) where the refusal was the pool's.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from rmm_managed_bridge._native import numpy_handler


class MemoryNotes:
    """The wrapped ``__init__``, from `put_on` until `take_off`. Does nothing where NumPy has no such class."""

    def __init__(self) -> None:
        self._class = _numpys_class()
        self._before: Callable[..., None] | None = None
        self._ours: Callable[..., None] | None = None

    def put_on(self) -> None:
        """Begin to add notes."""
        if self._class is None:
            return
        before: Callable[..., None] = self._class.__init__

        @functools.wraps(before)
        def with_note(error: Any, *args: Any, **kwargs: Any) -> None:
            before(error, *args, **kwargs)
            # Memory is short: what fails here must not hide the error that is being made.
            with contextlib.suppress(Exception):
                _add_note(error)

        self._before, self._ours = before, with_note
        self._class.__init__ = with_note

    def take_off(self) -> None:
        """End it, unless somebody wrapped the function again since: then theirs stays, and calls ours."""
        if self._class is not None and self._class.__init__ is self._ours:
            self._class.__init__ = self._before


def _numpys_class() -> Any:
    core = getattr(np, "_core", None)
    found = getattr(getattr(core, "_exceptions", None), "_ArrayMemoryError", None)
    known = isinstance(found, type) and issubclass(found, MemoryError) and "_total_size" in vars(found)
    return found if known else None


def _add_note(error: Any) -> None:
    refused = numpy_handler.take_refusal()
    # Another size: a refusal of before, which NumPy told in another way, and this is not the pool's.
    if refused is not None and refused[0] == max(error._total_size, 1):
        for note in (str(refused[1]), *getattr(refused[1], "__notes__", ())):
            error.add_note(note)
