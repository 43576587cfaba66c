"""All of it as one JSON object, for programs."""

import json
from pathlib import Path

from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.layout import ACTIONS
from rmm_managed_bridge.records import Allocation, CallSite, Holder


def write(content: Content, path: Path) -> None:
    """Write what the program was, who held the peak, what is alive, and every event."""
    names = content.names
    events = content.events
    columns = {
        name: events[name].tolist()
        for name in ("serial", "ptr", "bytes", "extra", "thread", "device", "site", "tag", "framework")
    }
    document = {
        "format": "rmm_managed_bridge recording",
        "version": 1,
        "pid": content.header.pid,
        "about": names.about,
        "ended": content.ended,
        "start_time_ns": content.header.start_time_ns,
        "current_bytes": content.current_bytes,
        "peak_bytes": content.peak.current_bytes,
        "forgotten_count": content.forgotten_count,
        "notes": list(content.notes),
        "sites": {number: _site(site) for number, site in names.sites.items()},
        "tags": names.tags,
        "frameworks": names.frameworks,
        "threads": names.threads,
        "peak_holders": [_record(holder) for holder in content.peak.holders],
        "alive": [_record(allocation) for allocation in content.allocations(content.blocks)],
        "events": {
            "action": [
                ACTIONS[number] if number < len(ACTIONS) else str(number) for number in events["action"].tolist()
            ],
            "time_ns": content.times_ns(events["order"]).tolist(),
            **columns,
        },
    }
    path.write_text(json.dumps(document), encoding="utf-8")


def _site(site: CallSite) -> dict[str, object]:
    return {"file": site.file, "line": site.line, "function": site.function}


def _record(record: Holder | Allocation) -> dict[str, object]:
    return {**record._asdict(), "site": _site(record.site)}
