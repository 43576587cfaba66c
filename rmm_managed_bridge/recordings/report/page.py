"""The page: what there is to see, in order, with every name of the program escaped."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources

from rmm_managed_bridge.recordings.content import Content, by_line
from rmm_managed_bridge.recordings.layout import ACTIONS, DAMAGE, FAILURE
from rmm_managed_bridge.recordings.over_time import over_time
from rmm_managed_bridge.recordings.report.chart import chart
from rmm_managed_bridge.recordings.report.flame import flame
from rmm_managed_bridge.records import Holder
from rmm_managed_bridge.units import format_bytes

_LINES = 25
_EVENTS = 100
_MOMENTS = 600


def report_page(content: Content) -> str:
    """Return one file of HTML that loads nothing."""
    peak = content.peak
    arguments = content.names.about.get("arguments")
    program = " ".join(map(str, arguments)) if isinstance(arguments, list) else ""
    title = escape(program or content.path.name)
    begun = datetime.fromtimestamp(_within(content.header.start_time_ns) / 1e9, UTC)
    facts = (
        ("peak", format_bytes(peak.current_bytes)),
        ("alive at the end", f"{format_bytes(content.current_bytes)} in {len(content.blocks)}"),
        ("events", f"{len(content.events)} kept, {content.forgotten_count} forgotten"),
        ("process", f"{content.header.pid}, {'ended' if content.ended else 'was killed, or ran on'}"),
        ("begun", f"{begun:%Y-%m-%d %H:%M:%S} UTC"),
    )
    parts = [
        f"<h1>{title}</h1>",
        '<dl class="facts">',
        *(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts),
        "</dl>",
        "".join(f'<p class="note">{escape(note)}</p>' for note in content.notes),
        "<h2>Memory over time</h2>",
        chart(over_time(content, _MOMENTS)),
        f"<h2>What was held at the peak</h2>{_off(content)}",
        flame(peak.holders),
        '<div class="two"><section><h2>Lines at the peak</h2>',
        _lines(peak.holders),
        "</section><section><h2>Lines at the end</h2>",
        _lines(content.holders(content.blocks)),
        "</section></div>",
        "<h2>Largest blocks alive at the end</h2>",
        _blocks(content),
        "<h2>Failures</h2>",
        _failures(content),
    ]
    files = resources.files(__package__)
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{style}</style></head><body>{''.join(parts)}<script>{script}</script></body></html>\n"
    )


def _off(content: Content) -> str:
    """The ledger's peaks of holders may be off by what a shard has not published."""
    off = content.peak.current_bytes - sum(holder.current_bytes for holder in content.peak.holders)
    text = f" They add up to {format_bytes(abs(off))} {'less' if off > 0 else 'more'} than the peak." if off else ""
    if not content.peak_is_kept:
        text += " The events of that time are forgotten: this is what the ledger wrote down."
    return f"<p>Framework, tags, file, function and line. Click a box to widen it, and again to go back.{text}</p>"


def _lines(holders: Sequence[Holder]) -> str:
    lines = by_line(list(holders))
    whole = sum(size for _, _, size, _ in lines)
    rows = [
        (format_bytes(size), f"{size / whole:.1%}" if whole else "", str(count), who, str(site), site.function)
        for site, who, size, count in lines[:_LINES]
    ]
    more = f"<p>and {len(lines) - _LINES} more lines</p>" if len(lines) > _LINES else ""
    return _table(("size", "share", "blocks", "framework", "line", "function"), rows) + more


def _blocks(content: Content) -> str:
    blocks = content.blocks[content.blocks["bytes"].argsort()[::-1][:_LINES]]
    rows = [
        (format_bytes(each.requested_bytes), f"{each.ptr:#x}", each.framework, each.tag, str(each.site), each.kind)
        for each in content.allocations(blocks)
    ]
    return _table(("size", "address", "framework", "tag", "line", "memory"), rows)


def _failures(content: Content) -> str:
    events = content.events[(content.events["action"] >= FAILURE) & (content.events["action"] <= DAMAGE)]
    times = content.times_ns(events["order"])
    rows = [
        (
            f"{time / 1e9:.3f} s",
            ACTIONS[int(event["action"])],
            format_bytes(int(event["bytes"])),
            content.names.framework(int(event["framework"])),
            content.names.tag(int(event["tag"])),
            str(content.names.site(int(event["site"]))),
        )
        for event, time in zip(events[:_EVENTS], times[:_EVENTS].tolist(), strict=True)
    ]
    if not rows:
        return "<p>None: no allocation failed, and no free was wrong.</p>"
    more = f"<p>and {len(events) - _EVENTS} more</p>" if len(events) > _EVENTS else ""
    return _table(("when", "what", "size", "framework", "tag", "line"), rows) + more


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return "<p>None.</p>"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _within(time_ns: int) -> int:
    """A time that the calendar has, whatever is in the file."""
    return min(max(time_ns, 0), 253402300799 * 10**9)
