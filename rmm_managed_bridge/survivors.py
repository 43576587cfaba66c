"""What is still alive in pools that are about to be retired, in words."""

from collections.abc import Iterable

from rmm_managed_bridge._native import core, ledger
from rmm_managed_bridge.units import format_bytes


def describe_survivors(heaps: Iterable[core.Heap]) -> str | None:
    """Return count, bytes, frameworks and call sites of the live blocks of `heaps`; None if there are none."""
    count = sum(heap.live_count for heap in heaps)
    if count == 0:
        return None
    size_bytes = sum(heap.live_bytes for heap in heaps)
    numbers = {heap.generation for heap in heaps}
    alive = [
        allocation
        for allocation in ledger.snapshot().allocations
        if (heap := core.heap_containing(allocation.ptr)) is not None and heap.generation in numbers
    ]
    frameworks = sorted({allocation.framework for allocation in alive})
    sites = list(dict.fromkeys(str(allocation.site) for allocation in alive))
    shown = ", ".join(sites[:5]) + (f" and {len(sites) - 5} more places" if len(sites) > 5 else "")
    made = f", of {', '.join(frameworks)}, made at {shown}" if alive else ""
    noun = "block" if count == 1 else "blocks"
    return (
        f"{count} live {noun}, {format_bytes(size_bytes)}{made}. They stay valid and go back to the old pool when they "
        "are freed"
    )
