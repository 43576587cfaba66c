"""Memory over time as an area for each framework, one upon the other."""

import json
from html import escape

from rmm_managed_bridge.recordings.over_time import OverTime
from rmm_managed_bridge.units import format_bytes

_COLOURS = 8  # that style.css has; the last is for all that come after
_TICKS = 4


def chart(found: OverTime) -> str:
    """Return the picture, whose shapes stretch with the page while its words do not."""
    start, end = found.times_s[0], found.times_s[-1]
    span, highest = (end - start) or 1.0, max(*found.total_bytes, 1)
    across = [(time - start) / span * 100 for time in found.times_s]
    base = [0] * len(across)
    areas, legend = [], []
    for number, (name, heights) in enumerate(found.by_framework.items()):
        top = [low + height for low, height in zip(base, heights, strict=True)]
        colour = min(number, _COLOURS - 1)
        areas.append(f'<path class="c{colour}" d="{_area(across, base, top, highest)}"/>')
        legend.append(f'<li><i class="c{colour}"></i>{escape(name)} <b>{format_bytes(max(heights))}</b></li>')
        base = top
    peak = across[found.peak_step]
    side = "left" if peak > 70 else ""
    text = f"peak {format_bytes(found.total_bytes[found.peak_step])} at {found.times_s[found.peak_step]:.3f} s"
    rows = "".join(
        f'<span class="tick" style="bottom:{step / _TICKS * 100}%">'
        f"<small>{format_bytes(highest * step // _TICKS)}</small></span>"
        for step in range(1, _TICKS + 1)
    )
    return f"""<figure class="chart">
<div class="plot" id="plot">
<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(text)}">{"".join(areas)}</svg>
{rows}<span class="peak {side}" style="left:{peak:.3f}%"><em>{text}</em></span><span id="cursor" hidden></span>
</div>
<div class="times"><span>{start:.3f} s</span><output id="readout"></output><span>{end:.3f} s</span></div>
<ul class="legend">{"".join(legend)}</ul>
</figure>
<script type="application/json" id="moments">{_data(found)}</script>"""


def _area(across: list[float], low: list[int], high: list[int], highest: int) -> str:
    """Memory stays as it is until the next moment: steps, not slopes."""

    def path(heights: list[int]) -> list[tuple[float, float]]:
        points = []
        for index, x in enumerate(across):
            if index:
                points.append((x, heights[index - 1]))
            points.append((x, heights[index]))
        return [(x, 100 - size / highest * 100) for x, size in points]

    points = path(high) + path(low)[::-1]
    return "M" + "L".join(f"{x:.3f} {y:.3f}" for x, y in points) + "Z"


def _data(found: OverTime) -> str:
    moments = {
        "seconds": [round(time, 6) for time in found.times_s],
        "total": [format_bytes(size) for size in found.total_bytes],
        "frameworks": {name: [format_bytes(size) for size in sizes] for name, sizes in found.by_framework.items()},
    }
    return json.dumps(moments).replace("<", "\\u003c")
