"""Getting data to a GPU and back: copies, page faults and each kind of hints, for four kinds of work, in one run.

python tests/bench/bench_transfer.py [FOLDER]     needs a GPU and CuPy; takes Warp, PyTorch and matplotlib if there

Holds 2 GiB of managed memory at most, and takes about 2 minutes. With a folder it writes `transfer.md` and, with
matplotlib, `transfer.png` into it.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cupy
import numpy as np
import rmm

sys.path.insert(0, str(Path(__file__).parent))
from transfer_ways import COPIES, MANAGED, DeviceHints, HostHints, Pageable, Pinned, Way, finish, run_on

import rmm_managed_bridge as bridge
from rmm_managed_bridge.hints.pages import PAGE_BYTES

MIB = 1 << 20
LIMIT = "3GiB"  # of managed memory, all in all
ONE_PASS_MIB = (64, 256, 1024, 2048)
OTHER_MIB = (64, 1024)
REPEATS = 3
PASSES = 20
ROUNDS = 4
READS = 8


class Row(NamedTuple):
    """One line of the table. `moved_bytes` is what the work needs to move or read at least, whatever a way does."""

    work: str
    size_mib: int
    way: str
    seconds: float
    moved_bytes: int

    @property
    def rate(self) -> float:
        """In 10^9 bytes a second."""
        return self.moved_bytes / self.seconds / 1e9


def timed(action: Callable[[], object]) -> float:
    finish()
    start = time.perf_counter()
    action()
    finish()
    return time.perf_counter() - start


def one_pass(way: Way) -> float:
    """New data on the CPU, one pass that reads and writes it, and the CPU reads the outcome."""

    def action() -> None:
        way.there()
        way.write_pass()
        way.back()
        way.touch()

    best = float("inf")
    for value in range(REPEATS + 1):  # the first one warms up
        way.fill(value)
        seconds = timed(action)
        best = min(best, seconds) if value else best
    return best


def many_passes(way: Way) -> float:
    """The passes after the first one."""
    way.fill(1)
    way.there()
    way.write_pass()
    finish()
    best = float("inf")
    for _ in range(REPEATS):
        best = min(best, timed(lambda: [way.write_pass() for _ in range(PASSES)]))
    return best


def ping_pong(way: Way) -> float:
    """CPU and device change the data in turn."""

    def action() -> None:
        for _ in range(ROUNDS):
            way.change()
            way.there()
            way.write_pass()
            way.back()
        way.touch()

    way.fill(1)
    return min(timed(action) for _ in range(2))


def table(way: Way) -> float:
    """Both read: the device all of it, the CPU some of every page, in turn."""

    def action() -> None:
        for _ in range(READS):
            way.read_pass()
            way.touch()

    way.fill(1)
    way.there()
    way.read_pass()
    finish()
    return min(timed(action) for _ in range(2))


WORKS: dict[str, tuple[Callable[[Way], float], int, tuple[int, ...]]] = {
    "one pass": (one_pass, 2, ONE_PASS_MIB),
    "many passes": (many_passes, 2 * PASSES, OTHER_MIB),
    "ping-pong": (ping_pong, 2 * ROUNDS, OTHER_MIB),
    "read-mostly table": (table, READS, OTHER_MIB),
}


def measure(kinds: list[type[Way]]) -> list[Row]:
    rows = []
    for work, (run, times, sizes) in WORKS.items():
        for size in sizes:
            for kind in kinds:
                if size > kind.writes_mib and run is not table:
                    continue
                seconds = run_on(kind, size * MIB // 4, run)
                if seconds is not None:
                    rows.append(Row(work, size, kind.name, seconds, times * size * MIB))
                    print(f"  {work}, {size} MiB, {kind.name}: {rows[-1].rate:.1f} GB/s", file=sys.stderr)
    return rows


def both_ways(way: Way) -> float:
    """Copies alone, there and back."""
    return min(timed(way.there) for _ in range(4)) + min(timed(way.back) for _ in range(4))


def pinned_limits() -> dict[int, float]:
    """Return for each size what copies there and back from pinned memory reach, in GB/s."""
    limits = {}
    for size in ONE_PASS_MIB:
        seconds = run_on(Pinned, size * MIB // 4, both_ways)
        assert seconds is not None
        limits[size] = 2 * size * MIB / seconds / 1e9
    return limits


def markdown(rows: list[Row], limits: dict[int, float]) -> str:
    lines = [
        f"{cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}, driver {cupy.cuda.runtime.driverGetVersion()}, "
        f"CuPy {cupy.__version__}, NumPy {np.__version__}, RMM {rmm.__version__}, pages of {PAGE_BYTES} bytes",
        "",
        "| work | MiB | way | ms | GB/s | of the pinned limit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    order = list(WORKS)
    for row in sorted(rows, key=lambda row: (order.index(row.work), row.size_mib)):
        share = row.rate / limits[row.size_mib]
        lines.append(
            f"| {row.work} | {row.size_mib} | {row.way} | {row.seconds * 1e3:.1f} | {row.rate:.1f} | {share:.2f} |"
        )
    lines.append("")
    lines.extend(f"Pinned limit at {size} MiB: {rate:.1f} GB/s." for size, rate in limits.items())
    lines.extend(verdicts(rows, limits))
    return "\n".join(lines) + "\n"


def verdicts(rows: list[Row], limits: dict[int, float]) -> list[str]:
    """The goals of docs/design, as this run has them."""

    def of(work: str, size: int, *kinds: type[Way]) -> float:
        names = [kind.name for kind in kinds]
        return max(row.rate for row in rows if (row.work, row.size_mib) == (work, size) and row.way in names)

    best = of("one pass", 1024, HostHints, DeviceHints)
    times, share = best / of("one pass", 1024, Pageable), best / limits[1024]
    passes = of("many passes", 1024, DeviceHints) / of("many passes", 1024, Pinned)
    return [
        f"One pass, 1 GiB: {times:.1f} times pageable copies (to reach: 5), {share:.2f} of the pinned limit (0.7).",
        f"Many passes, 1 GiB: {passes:.2f} of plain device memory (0.95).",
    ]


def plot(rows: list[Row], limits: dict[int, float], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no matplotlib, no plot", file=sys.stderr)
        return
    figure, axes = pyplot.subplots(2, 2, figsize=(14, 9), layout="constrained")
    ways = list(dict.fromkeys(row.way for row in rows))
    colours = dict(zip(ways, pyplot.colormaps["tab10"].colors, strict=False))
    for axis, work in zip(axes.flat, WORKS, strict=True):
        mine = [row for row in rows if row.work == work]
        axis.set_title(work)
        if work == "one pass":
            for way in ways:
                line = [(row.size_mib, row.rate) for row in mine if row.way == way]
                axis.plot(*zip(*line, strict=True), marker="o", label=way, color=colours[way])
            axis.plot(list(limits), list(limits.values()), "k--", label="pinned copies alone")
            axis.set(xscale="log", xlabel="MiB", ylabel="GB/s", xticks=ONE_PASS_MIB, ylim=(0, None))
            axis.set_xticklabels([str(size) for size in ONE_PASS_MIB])
            axis.minorticks_off()
        else:
            size = max(row.size_mib for row in mine)
            bars = [row for row in mine if row.size_mib == size]
            rates = [row.rate for row in bars]
            drawn = axis.barh([row.way for row in bars], rates, color=[colours[row.way] for row in bars])
            axis.bar_label(drawn, [f"{rate:.0f}" if rate > 100 else f"{rate:.1f}" for rate in rates], padding=3)
            axis.invert_yaxis()
            axis.set(xlabel=f"GB/s at {size} MiB", xscale="log", xlim=(1, 10_000), yticks=[])
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)


def main(arguments: list[str]) -> None:
    started = time.perf_counter()
    rmm.reinitialize(pool_allocator=False, managed_memory=True)
    limits = pinned_limits()
    rows = measure(COPIES)
    with bridge.installed("managed", frameworks=["numpy", "cupy"], maximum_pool_size=LIMIT):
        rows += measure(MANAGED)
    text = markdown(rows, limits)
    print(text)
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    if arguments:
        folder = Path(arguments[0])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "transfer.md").write_text(text, encoding="utf-8")
        plot(rows, limits, folder / "transfer.png")


if __name__ == "__main__":
    main(sys.argv[1:])
