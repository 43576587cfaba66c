"""The page about a recording: one file that loads nothing, in which names are text."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import rmm_managed_bridge as bridge
from rmm_managed_bridge.cli.main import main
from rmm_managed_bridge.recordings import read
from rmm_managed_bridge.recordings.report import report_page
from rmm_managed_bridge.recordings.report.flame import tree_of

_EVIL = "</script><script>alert('1')</script><img src=x onerror=alert(1)>\"'&"
_VOID = {"meta", "br"}


class Page(HTMLParser):
    """The elements and the text of a page, whose elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / f"{_EVIL.replace('/', '-')[:40]}.rec"
    with bridge.installed("host", maximum_pool_size="256MiB"), bridge.record(path, size="4MiB"):
        namespace: dict[str, object] = {"np": np}
        exec(compile("def make(n):\n    return np.empty(n)", f"program {_EVIL}.py", "exec"), namespace)
        make = namespace["make"]
        assert callable(make)
        with bridge.tag("outer"), bridge.tag(_EVIL.replace("/", "|")):
            kept = make(1 << 20)
        high = make(1 << 21)
        del high
        with pytest.raises(MemoryError):
            make(1 << 40)
        del kept
    return path


def test_the_page_is_whole_and_loads_nothing(recorded: Path) -> None:
    page = Page(report_page(read(recorded)))
    names = [tag for tag, _ in page.tags]
    assert not {"img", "iframe", "link", "object", "embed", "base"} & set(names)
    assert names.count("script") == 2
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes), tag
    style = "".join(page.words)
    assert not re.search(r"url\(|@import|https?:", style)


def test_names_are_text(recorded: Path) -> None:
    page = Page(report_page(read(recorded)))
    assert any(word.startswith(f"program {_EVIL}.py:2") for word in page.words)
    titles = [attributes.get("title") or "" for tag, attributes in page.tags if tag == "button"]
    assert any(title.startswith(f"tag {_EVIL.replace('/', '|')}") for title in titles)


def test_what_is_held_adds_up(recorded: Path) -> None:
    content = read(recorded)
    tree = tree_of(content.peak.holders)
    assert tree.size_bytes == content.peak.current_bytes == 24 << 20
    pending = [tree]
    while pending:
        box = pending.pop()
        assert not box.below or sum(each.size_bytes for each in box.below.values()) == box.size_bytes
        pending.extend(box.below.values())


def test_the_verb_writes_it_once(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(recorded), "-o", str(out)]) == 0
    assert "peak 24.0 MiB" in out.read_text(encoding="utf-8")
    assert "failure" in out.read_text(encoding="utf-8")
    assert main(["report", str(recorded), "-o", str(out)]) == 1
    assert "exists" in capsys.readouterr().err
    assert main(["report", str(recorded), "-o", str(out), "--force"]) == 0


def test_a_recording_of_nothing_has_a_page(tmp_path: Path) -> None:
    with bridge.record(tmp_path / "a.rec", size="4MiB"):
        pass
    content = read(tmp_path / "a.rec")
    assert len(content.events) == 0
    assert "None: no allocation failed" in report_page(content)
