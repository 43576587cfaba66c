"""The site, by Sphinx: `sphinx-build -W -b html docs OUTPUT`.

Its first page is docs/README.md, the index that people read in the repository too. The site's contents are what its
tables list, in their order, so there is no second list to keep.
"""

import re
from pathlib import Path
from typing import Any

import rmm_managed_bridge

project = "rmm_managed_bridge"
copyright = "the rmm_managed_bridge authors"  # noqa: A001 - Sphinx's name
release = rmm_managed_bridge.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
root_doc = "index"
exclude_patterns = ["README.md", "_build"]

autodoc_typehints = "none"  # the sections of each docstring say them in words
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
default_role = "code"
myst_heading_anchors = 3

html_theme = "furo"
html_title = "rmm_managed_bridge"

_SECTION = re.compile(r"^## (?P<caption>.+?)$(?P<text>.*?)(?=^## |\Z)", re.M | re.S)
_ROW = re.compile(r"^\| \[[^\]]+\]\((?P<page>[\w/]+)\.md\) \|", re.M)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def write_index(app: Any, name: str, content: list[str]) -> None:
    """Make the first page: the index, with contents after it. Files outside docs are named and not linked."""
    if name != root_doc:
        return
    page = Path(app.srcdir) / "README.md"
    app.env.note_dependency(str(page))
    index = page.read_text(encoding="utf-8")
    options = "```{toctree}\n:hidden:\n:caption: "
    contents = [
        "\n".join([options + section["caption"], "", *_ROW.findall(section["text"]), "```"])
        for section in _SECTION.finditer(index)
        if _ROW.search(section["text"])
    ]
    content[0] = _OUTSIDE.sub(r"\1", "\n\n".join([index, *contents]))


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("source-read", write_index)
