"""Trace events as Perfetto and Chrome read them: a counter for each framework, and a mark for what failed."""

import json
from pathlib import Path

from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.layout import ACTIONS, DAMAGE, FAILURE
from rmm_managed_bridge.recordings.over_time import over_time

_MOMENTS = 20_000


def write(content: Content, path: Path) -> None:
    """Write memory over time, in so many moments as a viewer can show; none of them misses a height."""
    pid = content.header.pid
    found = over_time(content, _MOMENTS)
    arguments = content.names.about.get("arguments")
    program = " ".join(map(str, arguments)) if isinstance(arguments, list) else content.path.name
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": program}}
    ]
    for step, time_s in enumerate(found.times_s):
        heights = {name: sizes[step] for name, sizes in found.by_framework.items()}
        base = {"ph": "C", "pid": pid, "tid": 0, "ts": time_s * 1e6}
        events.append({**base, "name": "live bytes", "args": {"bytes": found.total_bytes[step]}})
        if heights:
            events.append({**base, "name": "live bytes by framework", "args": heights})
    wrong = content.events[(content.events["action"] >= FAILURE) & (content.events["action"] <= DAMAGE)]
    for event, time_ns in zip(wrong, content.times_ns(wrong["order"]).tolist(), strict=True):
        site = content.names.site(int(event["site"]))
        events.append(
            {
                "ph": "i",
                "s": "p",
                "name": f"{ACTIONS[int(event['action'])]} at {site}",
                "pid": pid,
                "tid": int(event["thread"]),
                "ts": time_ns / 1e3,
                "args": {"bytes": int(event["bytes"])},
            }
        )
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"exporter": "rmm_managed_bridge"}}
    path.write_text(json.dumps(document), encoding="utf-8")
