"""speedscope's own JSON: one profile of the peak, one of the end."""

import json
from pathlib import Path

from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.export.stacks import stacks


def write(content: Content, path: Path) -> None:
    """Write both, with frames that they share."""
    frames: dict[str, int] = {}
    profiles = []
    for name, holders in (("at the peak", content.peak.holders), ("at the end", content.holders(content.blocks))):
        sums = stacks(list(holders))
        weights = [size for size, _ in sums.values()]
        profiles.append(
            {
                "type": "sampled",
                "name": name,
                "unit": "bytes",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": [[frames.setdefault(part, len(frames)) for part in stack] for stack in sums],
                "weights": weights,
            }
        )
    document = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": content.path.name,
        "exporter": "rmm_managed_bridge",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": profiles,
    }
    path.write_text(json.dumps(document), encoding="utf-8")
