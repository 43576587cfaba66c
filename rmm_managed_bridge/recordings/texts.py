"""The names in a recording: lines, tags, frameworks, threads, and what the program was."""

import json
from dataclasses import dataclass, field

import numpy as np

from rmm_managed_bridge.recordings.layout import (
    TEXT,
    TEXT_ABOUT,
    TEXT_FRAMEWORK,
    TEXT_SITE,
    TEXT_TAG,
    TEXT_THREAD,
)
from rmm_managed_bridge.records import CallSite

NATIVE = CallSite("native", 0, "")
OTHER = CallSite("other code", 0, "")


@dataclass
class Names:
    """What the numbers in events stand for. A number without a name is shown as one."""

    sites: dict[int, CallSite] = field(default_factory=lambda: {0: NATIVE, 1: OTHER})
    tags: dict[int, str] = field(default_factory=lambda: {0: ""})
    frameworks: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    about: dict[str, object] = field(default_factory=dict)
    whole: bool = True
    """Every record could be read."""

    def site(self, number: int) -> CallSite:
        return self.sites.get(number) or CallSite(f"line number {number}, whose name is not in the file", 0, "")

    def tag(self, number: int) -> str:
        return self.tags.get(number, f"tag number {number}")

    def framework(self, number: int) -> str:
        return self.frameworks.get(number, f"framework number {number}")


def read_names(data: memoryview) -> Names:
    """Return the names in the part of the text table that was written."""
    names = Names()
    place = 0
    while place < len(data):
        if place + TEXT.itemsize > len(data):
            names.whole = False
            break
        record = np.frombuffer(data, TEXT, 1, place)[0]
        start, size_bytes = place + TEXT.itemsize, int(record["bytes"])
        kind, number = int(record["kind"]), int(record["id"])
        if start + size_bytes > len(data) or kind == 0:
            names.whole = False
            break
        text = bytes(data[start : start + size_bytes])
        place = start + (size_bytes + 7) // 8 * 8
        if kind == TEXT_SITE:
            file_bytes = int(record["file_bytes"])
            if number > 1:
                file, function = _text(text[:file_bytes]), _text(text[file_bytes:])
                via = names.sites.get(int(record["via"])) if record["via"] else None  # written before it
                if via is not None and via.via is not None:
                    via = via._replace(via=None)  # damage: a line goes through one other
                names.sites[number] = CallSite(file, int(record["line"]), function, via, bool(record["flags"] & 1))
        elif kind == TEXT_TAG:
            names.tags[number] = _text(text)
        elif kind == TEXT_FRAMEWORK:
            names.frameworks[number] = _text(text)
        elif kind == TEXT_THREAD:
            names.threads[number] = _text(text)
        elif kind == TEXT_ABOUT:
            names.about.update(_about(text))
    return names


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


def _about(text: bytes) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
