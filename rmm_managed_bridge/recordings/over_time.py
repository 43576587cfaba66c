"""Memory over time, in so many steps as a picture has, none of which misses a height."""

from dataclasses import dataclass

import numpy as np

from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.layout import Array


@dataclass(frozen=True)
class OverTime:
    """What was live at some moments, in sum and by framework."""

    times_s: list[float]
    """Seconds since the recording began."""
    total_bytes: list[int]
    by_framework: dict[str, list[int]]
    """Whoever ever had the most comes first."""
    peak_step: int


def over_time(content: Content, steps: int = 200) -> OverTime:
    """Return about `steps` moments: of each stretch of time the one at which the most was live, and both ends."""
    live = content.live_bytes
    times = content.times_ns(content.moves["order"])
    times = np.concatenate([times[:1], times]) if len(times) else np.zeros(1, np.int64)
    chosen = _highest_of_each(times, live, max(steps, 1))
    now = content.alive_after(0)
    series: dict[str, Array] = {}
    frameworks = content.moves["framework"]
    for number in sorted({*np.unique(frameworks).tolist(), *np.unique(now["framework"]).tolist()}):
        at_start = int(now["bytes"][now["framework"] == number].sum(dtype=np.int64))
        changes = np.where(frameworks == number, content.deltas, 0)
        heights = at_start + np.concatenate([[0], np.cumsum(changes)])[chosen]
        name = content.names.framework(int(number))
        series[name] = series[name] + heights if name in series else heights
    ordered = sorted(series, key=lambda name: (-int(series[name].max()), name))
    return OverTime(
        times_s=[int(time) / 1e9 for time in times[chosen]],
        total_bytes=[int(size) for size in live[chosen]],
        by_framework={name: [int(size) for size in series[name]] for name in ordered},
        peak_step=int(np.argmax(live[chosen])),
    )


def _highest_of_each(times: Array, live: Array, steps: int) -> Array:
    """Return the indices: first, last, and of each stretch the highest."""
    span = int(times[-1] - times[0])
    stretch = np.minimum((times - times[0]) * steps // max(span, 1), steps - 1)
    # The last of those that are sorted by (stretch, height) is the highest of its stretch.
    order = np.lexsort((live, stretch))
    ends = np.flatnonzero(np.diff(stretch[order], append=stretch.max() + 1))
    return np.unique(np.concatenate([[0], order[ends], [len(live) - 1]]))
