"""Whole programs with the bridge and without: time and most memory, in one run, each in a process of its own.

python tests/bench/bench_programs.py [--repeats 3] [--only NAME ...] [--folder FOLDER]

What needs something that is not here is left out, and said so. With a folder it writes `programs.md` there and, with
matplotlib, `programs.png`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
import programs_of

from rmm_managed_bridge.units import format_bytes

PATIENCE_SECONDS = 600


class Side(NamedTuple):
    """One program's figures: the median of its runs, and of the memory the most."""

    seconds: float
    resident_bytes: int
    left_bytes: int
    card_bytes: int


class Row(NamedTuple):
    program: str
    ours: Side
    without: Side

    def ratio(self, figure: str) -> float | None:
        """Ours to theirs; None where theirs is too little to compare with."""
        ours, theirs = getattr(self.ours, figure), getattr(self.without, figure)
        return ours / theirs if theirs > (0 if figure == "seconds" else programs_of.MIB) else None


def measure(name: str, repeats: int) -> Row:
    """Run both sides in turn, so that what else the machine does falls on both."""
    runs: dict[str, list[dict[str, float]]] = {"bridge": [], "without": []}
    for _ in range(repeats):
        for side, found in runs.items():
            found.append(_run(name, side))
    return Row(name, _side(runs["bridge"]), _side(runs["without"]))


def _run(name: str, side: str) -> dict[str, float]:
    command = [sys.executable, str(Path(programs_of.__file__)), name, side]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    if done.returncode != 0:
        sys.exit(f"{name}, {side}, ended with {done.returncode}:\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _side(runs: list[dict[str, float]]) -> Side:
    most = {name: int(max(run[name] for run in runs)) for name in ("resident_bytes", "left_bytes", "card_bytes")}
    return Side(seconds=statistics.median(run["seconds"] for run in runs), **most)


HEADINGS = (
    "program",
    "time",
    "without",
    "ratio",
    "most resident",
    "without",
    "ratio",
    "most of the card",
    "without",
    "ratio",
)


def cells(row: Row) -> list[str]:
    def ratio(figure: str) -> str:
        found = row.ratio(figure)
        return "" if found is None else f"{found:.2f}"

    def card(side: Side) -> str:
        return format_bytes(side.card_bytes) if side.card_bytes else ""

    return [
        row.program,
        f"{row.ours.seconds:.2f} s",
        f"{row.without.seconds:.2f} s",
        ratio("seconds"),
        format_bytes(row.ours.resident_bytes),
        format_bytes(row.without.resident_bytes),
        ratio("resident_bytes"),
        card(row.ours),
        card(row.without),
        ratio("card_bytes"),
    ]


def print_rows(rows: list[Row]) -> None:
    table = Table(title="with the bridge, and without", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "program" else "right")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=150).print(table)


def markdown(rows: list[Row]) -> str:
    lines = [list(HEADINGS), ["---"] * len(HEADINGS), *map(cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draw the ratios as bars: time, most resident memory, and of the card where it was used."""
    from matplotlib.figure import Figure

    figures = {"seconds": "time", "resident_bytes": "most resident", "card_bytes": "most of the card"}
    shown = {name: text for name, text in figures.items() if any(row.ratio(name) is not None for row in rows)}
    figure = Figure(figsize=(9, 0.8 + 0.8 * len(rows)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(shown)
    for index, (name, text) in enumerate(shown.items()):
        bars = axes.barh(
            [place + index * height for place in range(len(rows))],
            [row.ratio(name) or 0 for row in rows],
            height,
            label=text,
        )
        axes.bar_label(
            bars, [f"{found:.2f}" if (found := row.ratio(name)) is not None else "" for row in rows], padding=3
        )
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(rows))], [row.program for row in rows])
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xlabel("with the bridge, as a multiple of without (less is better)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(programs_of.PROGRAMS), default=list(programs_of.PROGRAMS))
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        if absent := programs_of.missing(name):
            print(f"{name}: left out, since {', '.join(absent)} is not here")
            continue
        rows.append(measure(name, arguments.repeats))
        print(" ".join(cells(rows[-1])), flush=True)
    if not rows:
        return
    print_rows(rows)
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        (arguments.folder / "programs.md").write_text(markdown(rows), encoding="utf-8")
        try:
            draw(rows, arguments.folder / "programs.png")
        except ImportError:
            print("no picture: matplotlib is not here")


if __name__ == "__main__":
    main()
