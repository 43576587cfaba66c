"""Several records together, as a person wants to see them: a table as text, and one for notebooks."""

import html
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, SupportsIndex, TypeVar, overload

from rmm_managed_bridge.errors import ConfigError, shown

_SHORT = 20
"""Rows of what Python echoes by itself; what is printed is shown to its end."""
_WIDEST_CELL = 100
_GAP = "  "


class Row(Protocol):
    """A record that can be a row of a table."""

    def row(self) -> dict[str, str]:
        """Return the cells, by name of the column."""


RecordT = TypeVar("RecordT", bound=Row)
ValueT = TypeVar("ValueT")


class Records(tuple[RecordT, ...]):
    """A tuple of records that prints as a table. A slice of it is one too.

    ``print`` shows all of it, an interpreter's echo and a notebook the first rows.
    """

    __slots__ = ()

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> RecordT: ...
    @overload
    def __getitem__(self, index: slice, /) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> RecordT | Self:
        found = super().__getitem__(index)
        return type(self)(found) if isinstance(index, slice) else found  # type: ignore[arg-type, return-value]

    def __str__(self) -> str:
        return text_table([record.row() for record in self]) if self else "()"

    def __repr__(self) -> str:
        return text_table([record.row() for record in self[:_SHORT]], len(self)) if self else "()"

    def _repr_html_(self) -> str:
        return html_table([record.row() for record in self[:_SHORT]], len(self))


class Groups(dict[str, ValueT]):
    """A dictionary of sums that prints as a table, in its own order.

    Parameters
    ----------
    key : str
        What the sums are by, at the head of the first column.
    sums : mapping
        The values have cells, as records have, or are those of ``cells(value)``.
    """

    def __init__(self, key: str, sums: Mapping[str, ValueT]) -> None:
        super().__init__(sums)
        self.key = key

    def cells(self, value: Any) -> dict[str, str]:
        """Return the cells of one value."""
        found: dict[str, str] = value.row()
        return found

    def _rows(self, limit: int | None = None) -> list[dict[str, str]]:
        return [{self.key: name or "(none)", **self.cells(value)} for name, value in list(self.items())[:limit]]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key, dict(self))

    def __str__(self) -> str:
        return text_table(self._rows()) if self else "{}"

    def __repr__(self) -> str:
        return text_table(self._rows(_SHORT), len(self)) if self else "{}"

    def _repr_html_(self) -> str:
        return html_table(self._rows(_SHORT), len(self))


def text_table(rows: Sequence[Mapping[str, str]], count: int | None = None) -> str:
    """Return rows under their heads, numbers at the right; `count`: how many there are with those not given here."""
    heads = _heads(rows)
    cells = [[_one_line(row.get(head, "")) for head in heads] for row in rows]
    widths = [max(len(head), *(len(row[column]) for row in cells)) for column, head in enumerate(heads)]
    right = [all(row[column][:1].isdigit() or row[column][:1] in "+-" for row in cells) for column in range(len(heads))]
    lines = [
        _GAP.join(
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [heads, *cells]
    ]
    return "\n".join([*lines, *_rest(rows, count)])


def html_table(rows: Sequence[Mapping[str, str]], count: int | None = None) -> str:
    """Return the same for a notebook."""
    heads = _heads(rows)

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(_one_line(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line((row.get(head, "") for head in heads), "td") for row in rows)
    rest = "".join(f"<p>{html.escape(text)}</p>" for text in _rest(rows, count))
    return f"<table><thead>{line(heads, 'th')}</thead><tbody>{body}</tbody></table>{rest}"


def largest(items: Iterable[ValueT], size_of: Any, count: int) -> list[ValueT]:
    """Return the `count` items with the most bytes; none for a count below 1.

    Raises
    ------
    ConfigError
        If `count` is no integer.
    """
    try:
        most = max(operator.index(count), 0)
    except TypeError:
        raise ConfigError(f"count={shown(count)} is not a number of records; write top(5)") from None
    return sorted(items, key=lambda item: -size_of(item))[:most]


def _heads(rows: Iterable[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(head for row in rows for head in row))


def _one_line(cell: str) -> str:
    """Tags are the user's own text, and a line break in one must not break the table."""
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in cell)
    # From the left, as the end of a path says most.
    return text if len(text) <= _WIDEST_CELL else f"…{text[1 - _WIDEST_CELL :]}"


def _rest(rows: Sequence[Mapping[str, str]], count: int | None) -> list[str]:
    left = 0 if count is None else count - len(rows)
    return [f"... and {left} more; print() shows all"] if left > 0 else []
