"""The pickle that PyTorch's ``memory_viz`` shows: a segment for each live block, and a trace of all."""

import pickle
from pathlib import Path
from typing import Any

from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.export.steps import Step, steps


def write(content: Content, path: Path) -> None:
    """Write plain dictionaries, which need no PyTorch. Host memory is device 0 of what has no other."""
    names = content.names
    frames: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    first = max(content.header.start_time_ns, 0) // 1000

    def stack(framework: int, tag: int, site: int) -> list[dict[str, Any]]:
        """Innermost first."""
        key = (framework, tag, site)
        if key not in frames:
            place = names.site(site)
            outer = [{"name": names.framework(framework), "filename": "framework", "line": 0}]
            if names.tag(tag):
                outer.insert(0, {"name": names.tag(tag), "filename": "tag", "line": 0})
            inner = {"name": place.function or place.file, "filename": place.file, "line": place.line}
            frames[key] = [inner, *outer]
        return frames[key]

    def entry(action: str, step: Step) -> dict[str, Any]:
        return {
            "action": action,
            "addr": step.ptr,
            "size": step.size_bytes,
            "stream": step.stream,
            "time_us": first + step.time_ns // 1000,
            "frames": stack(step.framework, step.tag, step.site),
        }

    traces: dict[int, list[dict[str, Any]]] = {0: []}
    for step in steps(content):
        trace = traces.setdefault(max(step.device, 0), [])
        if step.comes:
            trace.append(entry("alloc", step))
        else:
            trace += [entry("free_requested", step), entry("free_completed", step)]
    segments = []
    for block in content.blocks:
        size = int(block["bytes"])
        held = {
            "address": int(block["ptr"]),
            "size": size,
            "requested_size": size,
            "state": "active_allocated",
            "frames": stack(int(block["framework"]), int(block["tag"]), int(block["site"])),
        }
        segments.append(
            {
                "device": max(int(block["device"]), 0),
                "address": int(block["ptr"]),
                "total_size": size,
                "allocated_size": size,
                "active_size": size,
                "requested_size": size,
                "stream": int(block["stream"]),
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": held["frames"],
                "blocks": [held],
            }
        )
    document = {
        "segments": segments,
        "device_traces": [traces.get(device, []) for device in range(max(traces) + 1)],
        "allocator_settings": {},
    }
    path.write_bytes(pickle.dumps(document, protocol=4))
