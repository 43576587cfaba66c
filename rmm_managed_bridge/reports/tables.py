"""Tables of snapshots, peaks, counters and the state of the bridge, as rich renderables."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rmm_managed_bridge.records import CallSite, Peak, Snapshot, Stats, Usage, device_name, group_value
from rmm_managed_bridge.reports.text import SiteText, to_text
from rmm_managed_bridge.units import format_bytes, format_count

if TYPE_CHECKING:
    from rmm_managed_bridge.records import Status

__all__ = ["peak_table", "provenance_table", "stats_table", "status_table", "to_text"]

_PROVENANCE = ("framework", "tag", "site", "device", "kind")


def provenance_table(snapshot: Snapshot, *, limit: int = 20, site_width: int = 40) -> Table:
    """Return who allocated what: the largest live allocations, then a total for each framework.

    Parameters
    ----------
    snapshot
        The live allocations.
    limit
        Number of allocations to list; the rest is summed up in one row.
    site_width
        Columns for ``file:line``; longer paths lose their beginning.
    """
    table = _table(f"{format_bytes(snapshot.current_bytes)} live in {format_count(len(snapshot), 'allocation')}")
    table.add_column("size", justify="right", no_wrap=True)
    _add_provenance_columns(table)
    shown = snapshot.top(limit)
    for allocation in shown:
        table.add_row(
            format_bytes(allocation.requested_bytes),
            *_provenance(allocation.framework, allocation.tag, allocation.site, site_width),
            group_value(allocation, "device"),
            allocation.kind,
        )
    if len(shown) < len(snapshot):
        rest_bytes = sum(a.requested_bytes for a in snapshot) - sum(a.requested_bytes for a in shown)
        rest = Text(f"and {len(snapshot) - len(shown)} smaller", style="dim")
        table.add_row(format_bytes(rest_bytes), rest)
    table.add_section()
    for framework, size_bytes in snapshot.by("framework").items():
        count = sum(allocation.framework == framework for allocation in snapshot)
        table.add_row(
            Text(format_bytes(size_bytes), style="bold"),
            Text(framework, style="bold"),
            Text("total", style="bold"),
            format_count(count, "allocation"),
        )
    return table


def peak_table(peak: Peak, count: int = 10, *, site_width: int = 40) -> Table:
    """Return who held the memory when it was at its highest, the `count` largest holders first."""
    table = _table(f"{format_bytes(peak.current_bytes)} live at the peak")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    _add_provenance_columns(table)
    shown = peak.top(count)
    for holder in shown:
        table.add_row(
            format_bytes(holder.current_bytes),
            _share(holder.current_bytes, peak.current_bytes),
            str(holder.current_count),
            *_provenance(holder.framework, holder.tag, holder.site, site_width),
            group_value(holder, "device"),
            holder.kind,
        )
    if len(shown) < len(peak.holders):
        rest_bytes = sum(h.current_bytes for h in peak.holders) - sum(h.current_bytes for h in shown)
        rest = Text(f"and {format_count(len(peak.holders) - len(shown), 'holder')} more", style="dim")
        table.add_row(format_bytes(rest_bytes), _share(rest_bytes, peak.current_bytes), "", rest)
    return table


def stats_table(stats: Stats) -> RenderableType:
    """Return the counters of the pools, then those of each framework.

    The counters of things that went wrong are listed only where one of them is not zero.
    """
    pools = _table("pools")
    pools.add_column("counter")
    pools.add_column("size", justify="right", no_wrap=True)
    pools.add_column("count", justify="right", no_wrap=True)
    pools.add_row("live", format_bytes(stats.current_bytes), str(stats.current_count))
    pools.add_row("peak", format_bytes(stats.peak_bytes))
    pools.add_row("total allocated", format_bytes(stats.total_bytes), str(stats.total_count))
    pools.add_row("reserved from upstream", format_bytes(stats.reserved_bytes))
    pools.add_row("  cached, free for use", format_bytes(stats.cached_bytes))
    pools.add_row("  quarantined, device work unfinished", format_bytes(stats.quarantined_bytes))
    wrong = {
        "foreign frees": stats.foreign_frees,
        "size mismatches": stats.size_mismatches,
        "failed allocations": stats.failures,
        "blocks written out of bounds or after free": stats.damaged_blocks,
    }
    if any(wrong.values()):
        pools.add_section()
        for name, number in wrong.items():
            pools.add_row(Text(name, style="red"), "", str(number))
    usages = stats.by("framework")
    return Group(pools, _usage_table(usages)) if usages else pools


def status_table(status: "Status") -> RenderableType:
    """Return how the bridge stands: backend, each framework with the reason if it is not hooked, and the pools."""
    facts = _table("bridge")
    facts.add_column("what")
    facts.add_column("state", overflow="fold")
    facts.add_row("installed", "yes" if status.installed else "no")
    facts.add_row("backend", status.backend or "none")
    facts.add_row("reason", Text(status.reason))
    facts.add_row("devices", ", ".join(f"cuda:{device}" for device in status.devices) or "none")
    facts.add_row("numpy scope", status.numpy_scope or "none")
    facts.add_row("tracking", status.track)
    for note in status.notes:
        facts.add_row("note", Text(note))
    if status.frameworks:
        facts.add_section()
        for framework, state in status.frameworks.items():
            facts.add_row(Text(framework), Text(state, style="green" if state == "hooked" else "yellow"))
    if not status.pools:
        return facts
    pools = _table("pools")
    for name in ("pool", "device", "kind", "state"):
        pools.add_column(name, no_wrap=True)
    for name in ("live", "count", "reserved"):
        pools.add_column(name, justify="right", no_wrap=True)
    for each in status.pools:
        pools.add_row(
            str(each.number),
            device_name(each.device),
            each.kind,
            "current" if each.current else "retired",
            format_bytes(each.current_bytes),
            str(each.current_count),
            format_bytes(each.reserved_bytes),
        )
    return Group(facts, pools)


def _usage_table(usages: Mapping[str, Usage]) -> Table:
    table = _table("frameworks")
    table.add_column("framework")
    for name in ("live", "count", "own peak", "total", "total count"):
        table.add_column(name, justify="right", no_wrap=True)
    for framework, usage in usages.items():
        table.add_row(
            Text(framework),
            format_bytes(usage.current_bytes),
            str(usage.current_count),
            format_bytes(usage.peak_bytes),
            format_bytes(usage.total_bytes),
            str(usage.total_count),
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, header_style="bold cyan")


def _add_provenance_columns(table: Table) -> None:
    for name in _PROVENANCE:
        # Where room is short, rich takes it from the columns that may wrap: these two can bear it.
        table.add_column(name, no_wrap=name not in ("tag", "site"), overflow="fold")


def _provenance(framework: str, tag: str, site: CallSite, site_width: int) -> tuple[Text, Text, SiteText]:
    # Text, not str: a tag or a path with square brackets would be read as markup.
    return Text(framework), Text(tag), SiteText(site.file, site.line, site_width)


def _share(part_bytes: int, whole_bytes: int) -> str:
    return f"{100 * part_bytes / whole_bytes:.0f} %" if whole_bytes else ""
