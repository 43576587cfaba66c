"""The commands that the guide shows about recordings work as they are written."""

import re
import shlex
from pathlib import Path

import pytest
from helpers.documents import ROOT

from rmm_managed_bridge.cli.main import main
from rmm_managed_bridge.recordings.export import FORMATS

PAGE = (ROOT / "docs/guide/leaks.md").read_text(encoding="utf-8")
PROGRAM = """
import sys
import numpy as np
assert sys.argv[1:] in ([], ["--its", "options"])
kept = [np.ones(1 << 16) for _ in range(4)]
"""


def commands() -> list[str]:
    """Return the lines of the page's shell blocks that begin with the command."""
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S))
    return re.findall(r"^rmm-bridge (.*)$", blocks, re.M)


def test_the_commands_of_the_page_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    for name in ("before.rec", "after.rec"):
        assert main(["run", "-o", name, "program.py"]) == 0
    lines = commands()
    assert lines[0].startswith("run -o program.rec")
    for line in lines:
        code = main(shlex.split(line, comments=True))
        # Nothing lay at the address that stands for any.
        assert code == (1 if line.startswith("where") else 0), f"{line}: {capsys.readouterr().err}"
    inline = re.findall(r"`rmm-bridge (report [^`]*)`", PAGE)
    assert [main(shlex.split(line)) for line in inline] == [0]


def test_every_format_is_in_the_page() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.M) == list(FORMATS)
