"""What was held at one moment, as stacks of names: framework, tags, file, function and line."""

from collections.abc import Sequence

from rmm_managed_bridge.records import Holder


def stack_of(holder: Holder) -> list[str]:
    """Return the names, outermost first."""
    site = holder.site
    tags = [f"tag {part}" for part in holder.tag.split("/")] if holder.tag else []
    line = f"{site.function} ({site.file}:{site.line})" if site.line else site.file
    via = [f"via {site.via.function} ({site.via.place})"] if site.via is not None else []
    return [holder.framework, *tags, line, *via]


def stacks(holders: Sequence[Holder]) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return (bytes, count) by stack, over all devices and kinds of memory."""
    sums: dict[tuple[str, ...], tuple[int, int]] = {}
    for holder in holders:
        key = tuple(stack_of(holder))
        size, count = sums.get(key, (0, 0))
        sums[key] = (size + holder.current_bytes, count + holder.current_count)
    return sums
