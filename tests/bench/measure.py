"""Time a callable, and print rows of ratios. These machines are noisy: only ratios within one run mean anything."""

import timeit
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One comparison: ours against a peer, and the ratio to reach (None: only shown)."""

    work: str
    ours_ns: float
    peer: str
    peer_ns: float
    goal: float | None

    @property
    def ratio(self) -> float:
        return self.ours_ns / self.peer_ns


def best_ns(work: Callable[[], object], count: int = 2000, repeats: int = 9) -> float:
    """Return nanoseconds a call: the best of `repeats` runs of `count` calls, after one run to warm up."""
    timer = timeit.Timer(work)
    timer.timeit(max(count // 10, 1))
    return min(timer.repeat(repeats, count)) / count * 1e9


def print_rows(title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("work", "ours", "peer", "its time", "ratio", "goal", ""):
        table.add_column(heading, justify="left" if heading in ("work", "peer", "") else "right")
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:.2f}"
        verdict = "" if row.goal is None else "reached" if row.ratio <= row.goal else "not reached"
        table.add_row(row.work, as_time(row.ours_ns), row.peer, as_time(row.peer_ns), f"{row.ratio:.2f}", goal, verdict)
    Console(width=140).print(table)


def as_time(ns: float) -> str:
    """Return nanoseconds as text with a unit."""
    return f"{ns:.0f} ns" if ns < 1e4 else f"{ns / 1e3:.1f} us" if ns < 1e7 else f"{ns / 1e6:.1f} ms"
