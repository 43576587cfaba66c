"""What was held at one moment as a flame graph: framework, tags, file, function and line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import PurePath

from rmm_managed_bridge.records import Holder
from rmm_managed_bridge.units import format_bytes, format_count

_LEAST_SHARE = 0.0005  # of the whole, below which a box is not drawn
_DEEPEST = 40


@dataclass
class Box:
    """One name, and what is held below it."""

    name: str
    size_bytes: int = 0
    count: int = 0
    below: "dict[str, Box]" = field(default_factory=dict)


def path_of(holder: Holder) -> list[str]:
    """Return the names from the root down to a holder."""
    site = holder.site
    tags = [f"tag {part}" for part in holder.tag.split("/")] if holder.tag else []
    line = [f"{site.function}:{site.line}"] if site.line else []
    via = [f"via {site.via.place}"] if site.via is not None else []
    return [holder.framework, *tags[:_DEEPEST], site.file, *line, *via]


def tree_of(holders: Sequence[Holder]) -> Box:
    """Return the sums over all that begins with the same names."""
    root = Box("all")
    for holder in holders:
        box = root
        for name in ["", *path_of(holder)]:
            box = box.below.setdefault(name, Box(name)) if name else box
            box.size_bytes += holder.current_bytes
            box.count += holder.current_count
    return root


def flame(holders: Sequence[Holder]) -> str:
    """Return the graph: each box as wide as what is held below it. A click makes one as wide as all."""
    root = tree_of(holders)
    if root.size_bytes <= 0:
        return "<p>Nothing was held.</p>"
    return f'<div class="flame" id="flame">{_drawn(root, root.size_bytes, root.size_bytes, 0)}</div>'


def _drawn(box: Box, around_bytes: int, all_bytes: int, depth: int) -> str:
    width = box.size_bytes / around_bytes * 100 if around_bytes else 0.0
    text = f"{format_bytes(box.size_bytes)} in {format_count(box.count, 'block')}, {box.size_bytes / all_bytes:.1%}"
    shown = box.name if box.name.startswith("tag ") else PurePath(box.name).name or box.name
    below = sorted(box.below.values(), key=lambda each: -each.size_bytes)
    drawn = "".join(
        _drawn(each, box.size_bytes, all_bytes, depth + 1)
        for each in below
        if each.size_bytes >= _LEAST_SHARE * all_bytes
    )
    return (
        f'<div class="box" style="width:{width:.4f}%"><button class="d{depth % 5}" title="{escape(box.name)}: {text}">'
        f'{escape(shown)} <b>{format_bytes(box.size_bytes)}</b></button><div class="row">{drawn}</div></div>'
    )
