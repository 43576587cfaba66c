"""Collapsed stacks: a line for each, names with ``;`` between them, and bytes."""

from pathlib import Path

from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.export.stacks import stacks


def write(content: Content, path: Path) -> None:
    """Write what was held at the peak."""
    lines = [
        f"{';'.join(_name(part) for part in stack)} {size}\n"
        for stack, (size, _) in stacks(content.peak.holders).items()
    ]
    path.write_bytes("".join(lines).encode("utf-8", "replace"))


def _name(text: str) -> str:
    """The format has no way to write these in a name."""
    return " ".join(text.replace(";", ",").split()) or "?"
