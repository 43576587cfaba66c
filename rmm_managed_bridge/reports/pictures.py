"""Pictures as PNG files. Matplotlib is imported only when one is drawn, and no display is ever needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rmm_managed_bridge.errors import BridgeError
from rmm_managed_bridge.reports.timeline import MemorySample, framework_names, highest_sample
from rmm_managed_bridge.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["require_matplotlib", "save_field", "save_memory_over_time"]

_MIB = 1 << 20
_COLOURS = {"numpy": "#4C78A8", "cupy": "#59A14F", "warp": "#F28E2B", "torch": "#B07AA1", "native": "#9C9C9C"}
_OTHER_COLOURS = ("#76B7B2", "#EDC948", "#FF9DA7", "#9C755F")
_INK = "#333333"
_PEAK = "#C0392B"
_LABEL_ROWS = 3
# Width of one character of a label, as a fraction of the axes.
_LABEL_CHARACTER = 0.0085


def require_matplotlib() -> None:
    """Raise a :class:`BridgeError` that names the cure if Matplotlib cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise BridgeError(
            f'pictures need Matplotlib, which cannot be imported ({error}); run: pip install "rmm-managed-bridge[demo]"'
        ) from error


def save_memory_over_time(samples: Sequence[MemorySample], path: str | Path, *, peak_bytes: int | None = None) -> Path:
    """Draw the live bytes of each framework, stacked, over time, and mark the highest sample.

    Parameters
    ----------
    samples
        In order of time, at least one.
    path
        PNG file to write.
    peak_bytes
        The exact high-water mark, where it is known. Samples can miss it, so it is drawn as a line of its own.

    Returns
    -------
    Path
        The file that was written.
    """
    highest = highest_sample(samples)
    figure = _figure(10.0, 5.2)
    axes = figure.add_subplot()
    times_s = np.array([sample.time_s for sample in samples])
    names = framework_names(samples)
    layers_mib = [[sample.bytes_by_framework.get(name, 0) / _MIB for sample in samples] for name in names]
    if names:
        # A level holds until the next sample: slopes between samples would show bytes that nobody held.
        axes.stackplot(times_s, *layers_mib, labels=names, colors=_colours(names), step="post", alpha=0.85, linewidth=0)
    totals_mib = [sample.current_bytes / _MIB for sample in samples]
    axes.step(times_s, totals_mib, where="post", color=_INK, linewidth=0.5, alpha=0.5)
    top_mib = max(highest.current_bytes, peak_bytes or 0, 1) / _MIB
    axes.set_ylim(0, top_mib * 1.35)
    axes.set_xlim(times_s[0], max(float(times_s[-1]), float(times_s[0]) + 1e-3))
    _mark_peak(axes, highest, peak_bytes)
    _mark_phases(axes, samples)
    axes.set_xlabel("time in s")
    axes.set_ylabel("live memory in MiB")
    axes.set_title("Who held the memory", loc="left", fontsize=14, fontweight="bold", color=_INK, pad=12)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    # Same order as the stack, so that the eye need not cross over.
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, title="framework")
    return _save(figure, path)


def save_field(fields: Sequence[npt.NDArray[np.floating]], titles: Sequence[str], path: str | Path) -> Path:
    """Draw fields side by side, on one colour scale that is symmetric about zero.

    Parameters
    ----------
    fields
        Two-dimensional arrays, at least one.
    titles
        One for each field.
    path
        PNG file to write.

    Returns
    -------
    Path
        The file that was written.
    """
    if not fields or len(fields) != len(titles):
        raise ValueError(f"{len(fields)} fields and {len(titles)} titles were given; give one title for each field")
    # A percentile, so that one bright cell does not make the rest of the picture pale.
    limit = max(float(np.percentile(np.abs(field), 99.5)) for field in fields) or 1.0
    figure = _figure(4.6 * len(fields) + 0.8, 5.0)
    panels = figure.subplots(1, len(fields), squeeze=False)[0]
    for axes, field, title in zip(panels, fields, titles, strict=True):
        image = axes.imshow(field, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="antialiased")
        axes.set_title(title, fontsize=12, color=_INK, pad=8)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color("#BBBBBB")
    figure.colorbar(image, ax=list(panels), label="displacement", shrink=0.8, pad=0.015, extend="both")
    return _save(figure, path)


def _mark_peak(axes: "Axes", highest: MemorySample, peak_bytes: int | None) -> None:
    height_mib = highest.current_bytes / _MIB
    text = f"peak {format_bytes(highest.current_bytes)} at {highest.time_s:.2f} s"
    if peak_bytes is not None:
        axes.axhline(peak_bytes / _MIB, color=_PEAK, linewidth=1.0, linestyle=(0, (5, 3)))
        if peak_bytes > highest.current_bytes:
            text = f"high-water mark {format_bytes(peak_bytes)}\nhighest sample {format_bytes(highest.current_bytes)}"
    start_s, end_s = axes.get_xlim()
    late = highest.time_s > (start_s + end_s) / 2
    axes.plot([highest.time_s], [height_mib], "o", color=_PEAK, markersize=7, markeredgecolor="white", zorder=5)
    axes.annotate(
        text,
        (highest.time_s, max(height_mib, (peak_bytes or 0) / _MIB)),
        xytext=(-8 if late else 8, 7),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        color=_PEAK,
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
        zorder=6,
    )


def _mark_phases(axes: "Axes", samples: Sequence[MemorySample]) -> None:
    start_s, end_s = axes.get_xlim()
    row_ends = [0.0] * _LABEL_ROWS
    for sample in samples:
        if not sample.marks:
            continue
        text = ", ".join(sample.marks)
        start = (sample.time_s - start_s) / (end_s - start_s)
        # The first row that is free here, so that short phases do not write over each other.
        row = next((index for index, end in enumerate(row_ends) if end <= start), _LABEL_ROWS - 1)
        row_ends[row] = start + _LABEL_CHARACTER * (len(text) + 2)
        axes.axvline(sample.time_s, color="#777777", linewidth=0.8, linestyle=":")
        axes.annotate(
            text,
            (sample.time_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, -3 - 14 * row),
            textcoords="offset points",
            ha="left" if start < 1 - _LABEL_CHARACTER * len(text) else "right",
            va="top",
            fontsize=9.5,
            color="#555555",
        )


def _colours(names: Sequence[str]) -> list[str]:
    others = [name for name in names if name not in _COLOURS]
    spare = {name: _OTHER_COLOURS[index % len(_OTHER_COLOURS)] for index, name in enumerate(others)}
    return [_COLOURS.get(name) or spare[name] for name in names]


def _figure(width_inches: float, height_inches: float) -> "Figure":
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: "Figure", path: str | Path) -> Path:
    target = Path(path)
    try:
        figure.savefig(target, format="png", dpi=140)
    except OSError as error:
        raise BridgeError(f"cannot write the picture {target}: {error}; choose another folder") from error
    return target
