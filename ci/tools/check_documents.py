"""Count what a reader of the documents meets, and refuse what is hard to read or left out.

Of the pages: sentences above 30 words, items of a list above 4 lines. Of each public name: a block of code in the pages
that uses it, its place in the reference, and the sections and the example of its docstring. That blocks and examples
run is for the tests.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/README.md", "docs/api", "docs/guide", "docs/gallery")
REFERENCE = "docs/api/reference.md"
MOST_WORDS = 30
MOST_LINES = 4
# What the bridge makes and hands out: nobody calls these, so they have no parameters to describe.
MADE_BY_THE_BRIDGE = frozenset(
    {
        "Allocation",
        "Bridge",
        "CallSite",
        "HintResult",
        "HintSkip",
        "Recording",
        "Residency",
        "Snapshot",
        "Stats",
        "Status",
    }
)

_FENCE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)[ \t]*$", re.M | re.S)
_CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_INLINE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+")
_WORD = re.compile(r"\w")


def sentences_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each sentence: of paragraphs, headings, items of lists and cells of tables.

    What stands in a pair of backquotes is one word.
    """
    for line, passage in _passages(text):
        whole = _LINK.sub(r"\1", _INLINE.sub("code", passage))
        for sentence in _END.split(whole):
            if sentence.strip():
                yield line, sentence.strip()


def items_of(text: str) -> Iterator[tuple[int, int]]:
    """Yield the line and the number of lines of each item of a list, code in it left out."""
    start = count = 0
    for number, line in enumerate(_without_code(text).split("\n"), 1):
        if _ITEM.match(line) or not line.startswith(" "):
            if start:
                yield start, count
            start, count = (number, 1) if _ITEM.match(line) else (0, 0)
        elif start and line.strip():
            count += 1
    if start:
        yield start, count


def check_page(page: str, text: str) -> list[str]:
    """Return what is too long on one page."""
    findings = []
    for line, sentence in sentences_of(text):
        words = sum(1 for word in sentence.split() if _WORD.search(word))
        if words > MOST_WORDS:
            start = " ".join(sentence.split()[:6])
            findings.append(f"{page}:{line}: a sentence of {words} words, above {MOST_WORDS}: {start} ...")
    for line, count in items_of(text):
        if count > MOST_LINES:
            findings.append(f"{page}:{line}: an item of {count} lines, above {MOST_LINES}; split it, or make it text")
    return findings


def check_names(names: Mapping[str, Any], code: str, reference: str) -> list[str]:
    """Return what is missing for public names: in the pages' code, in the reference, in their docstrings."""
    findings = []
    for name, thing in names.items():
        if not re.search(rf"\b{name}\b", code):
            findings.append(f"{name}: in no block of code of the pages")
        if not re.search(rf"^\.\. auto\w+:: {name}$", reference, re.M):
            findings.append(f"{name}: not in {REFERENCE}")
        text = inspect.getdoc(thing) or ""
        missing = [section for section in _sections_for(name, thing, text) if f"{section}\n---" not in text]
        findings += [f"{name}: its docstring has no section {section}" for section in missing]
        if ">>> " not in text:
            findings.append(f"{name}: its docstring has no example")
    return findings


def _sections_for(name: str, thing: Any, text: str) -> list[str]:
    if name in MADE_BY_THE_BRIDGE or not callable(thing):
        return []
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return []
    # RMM's resources are made by __cinit__, and their __init__ takes anything.
    signature = inspect.signature(thing)
    sections = ["Parameters"] if signature.parameters else []
    if signature.parameters and "Never an error" not in text:
        sections.append("Raises")
    if inspect.isfunction(thing) and signature.return_annotation not in (None, "None", "NoReturn"):
        # A context manager made of a generator returns what nobody looks at.
        sections += [] if re.search("NoReturn|Iterator", str(signature.return_annotation)) else ["Returns"]
    return sections


def _passages(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    parts: list[str] = []
    for number, line in enumerate([*_without_code(text).split("\n"), ""], 1):
        stripped = line.strip()
        alone = stripped.startswith(("|", "#")) or not stripped
        if parts and (alone or _ITEM.match(line)):
            yield start, " ".join(parts)
            parts = []
        if stripped.startswith("|"):
            yield from ((number, cell.strip()) for cell in stripped.strip("|").split(" | "))
        elif stripped.startswith("#"):
            yield number, stripped.lstrip("# ")
        elif stripped:
            start = start if parts else number
            item = _ITEM.match(line)
            parts.append(line[item.end() :].strip() if item else stripped)


def _without_code(text: str) -> str:
    """Blank what is no prose, so that lines keep their numbers."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    return _COMMENT.sub(blank, _FENCE.sub(blank, text))


def pages_of(root: Path) -> dict[str, str]:
    """Return the text of each page by its path."""
    found = {}
    for name in PAGES:
        path = root / name
        for page in sorted(path.rglob("*.md")) if path.is_dir() else [path]:
            found[str(page.relative_to(root))] = page.read_text(encoding="utf-8")
    return found


def main() -> int:
    """Check the pages of a folder, and the public names of the package."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    pages = pages_of(root)
    findings = [finding for page, text in pages.items() for finding in check_page(page, text)]
    package = importlib.import_module("rmm_managed_bridge")
    names = {name: getattr(package, name) for name in package.__all__}
    blocks = [block for text in pages.values() for block in _CODE.findall(text)]
    findings += check_names(names, "\n".join(blocks), pages.get(REFERENCE, ""))
    sentences = sum(1 for text in pages.values() for _ in sentences_of(text))
    print("\n".join(findings))
    print(f"documents: {len(pages)} pages, {sentences} sentences, {len(blocks)} blocks of code, {len(names)} names")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
