"""`rmm-bridge demo`: a photograph made to swing, by three frameworks on one pool."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rmm_managed_bridge.errors import BridgeError

if TYPE_CHECKING:
    from rich.console import Console

    from rmm_managed_bridge.cli.demo.run import DemoResult
    from rmm_managed_bridge.cli.demo.wave import Check

__all__ = ["demo", "require_checks"]

_BACKENDS = ("auto", "host", "managed")


@click.command()
@click.option("--size", default=1024, show_default=True, type=click.IntRange(64, 4096), help="Cells along each side.")
@click.option("--steps", default=400, show_default=True, type=click.IntRange(4, 20000), help="Steps of time.")
@click.option("--backend", default="auto", show_default=True, type=click.Choice(_BACKENDS), help="Memory to work on.")
@click.option(
    "--output",
    default="rmm-bridge-demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the pictures; made if it is missing.",
)
def demo(size: int, steps: int, backend: str, output: Path) -> None:
    """Solve a wave equation with NumPy, CuPy and Warp on one pool.

    A photograph is the initial displacement. NumPy prepares it, CuPy (NumPy without a GPU) and Warp step it in turn,
    and NumPy analyses it, all on the same bytes. The answer is checked against NumPy on ordinary memory and against
    the exact solution; a failed check is exit code 1.
    """
    from rmm_managed_bridge.cli.console import make_console
    from rmm_managed_bridge.cli.demo.run import run_demo
    from rmm_managed_bridge.reports.pictures import require_matplotlib

    # All that can fail for want of something goes first, not after the work.
    require_matplotlib()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BridgeError(f"cannot make the folder {output}: {error.strerror}; choose another with --output") from error

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = make_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("stepping", total=steps)
        result = run_demo(size, steps, backend, lambda number: progress.update(task, completed=number))
    _print_result(console, result, size, steps)
    for picture in _save_pictures(result, steps, output):
        console.print(f"picture: {picture}", soft_wrap=True)
    require_checks(result.checks)


def require_checks(checks: "tuple[Check, ...]") -> None:
    """Raise a :class:`BridgeError` that names every check that failed."""
    failed = [f"{check.name} {check.value:.1e}, allowed is {check.limit:.1e}" for check in checks if not check.passed]
    if failed:
        raise BridgeError(f"the demo's answer is wrong: {'; '.join(failed)}; report this with `rmm-bridge info --json`")


def _print_result(console: "Console", result: "DemoResult", size: int, steps: int) -> None:
    from rmm_managed_bridge.reports.tables import peak_table, provenance_table

    lines = [f"backend {result.backend}: {result.reason}", *result.notes]
    turn = " in turn" if len(result.stage_names) > 1 else ""
    stages = " and ".join(result.stage_names)
    lines.append(f"{steps} steps on {size} x {size} cells by {stages}{turn}, {result.stepping_s:.2f} s")
    first, last = result.wavelengths
    lines.append(f"half of the stretching is in waves longer than {first:.0f} cells at first, {last:.0f} at last")
    lines.append("")
    for check in result.checks:
        verdict = "ok  " if check.passed else "FAIL"
        lines.append(f"{verdict} {check.name} {check.value:.1e} (allowed {check.limit:.1e})")
    lines += ["", "no byte was copied between frameworks; each sees every field at the same address:"]
    for maker, addresses in result.views:
        places = "  ".join(f"{framework} {address:#x}" for framework, address in addresses.items())
        lines.append(f"  made by {maker:<6} {places}")
    console.print("\n".join(lines), soft_wrap=True)
    console.print()
    console.print(provenance_table(result.snapshot, limit=12))
    console.print(peak_table(result.snapshot.peak, 8))


def _save_pictures(result: "DemoResult", steps: int, output: Path) -> tuple[Path, Path]:
    from rmm_managed_bridge.reports.pictures import save_field, save_memory_over_time

    titles = ("at rest", f"after {steps // 2} steps", f"after {steps} steps")
    fields = (result.initial, result.middle, result.final)
    return (
        save_field(fields, titles, output / "wave.png"),
        save_memory_over_time(result.samples, output / "memory.png", peak_bytes=result.snapshot.peak.current_bytes),
    )
