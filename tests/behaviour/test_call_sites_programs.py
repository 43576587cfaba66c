"""What the program is, however it was started, and what of it a call site names."""

import json
import re
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest
from helpers.programs import must_succeed, program_environment, run_python
from helpers.shown_sites import MAKE, PROGRAM, make_package, shown_sites

pytestmark = pytest.mark.behaviour("P6")


def test_the_command_line_runs_as_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM) + "bridge.install('host')\nshow(np.empty(9))"],
        capture_output=True,
        text=True,
        env=program_environment(),
        cwd=tmp_path,
        check=False,
    )
    assert json.loads(must_succeed(done)) == ["<string>", 11, "<module>", None, False]


APPLICATION = """
import json, os, sys
import numpy as np
import helping, rmm_managed_bridge as bridge
def main():
    bridge.install("host")
    for array in np.empty(9), helping.make():
        site = bridge.allocation_of(array).site
        print(json.dumps([os.path.basename(site.file), site.line, site.via and os.path.basename(site.via.file)]))
"""


@pytest.mark.parametrize("how", ["-m", "command"])
def test_an_installed_application_is_the_program(how: str, tmp_path: Path) -> None:
    """Its distribution has another name than its packages, of which one helps; who depends on nothing is a library."""
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    make_package(
        site, "app_of_mine", {"__main__.py": "from app_of_mine.run import main\nmain()\n", "run.py": APPLICATION}
    )
    (site / "helping.py").write_text("import brick\ndef make(): return brick.make()\n")
    (site / "brick.py").write_text(MAKE)
    info = site / "an_application-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: an-application\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nmy-command = app_of_mine.run:main\n")
    files = ["app_of_mine/__init__.py", "app_of_mine/__main__.py", "app_of_mine/run.py", "helping.py"]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    command = tmp_path / "env" / "bin" / "my-command"
    command.write_text("import sys\nfrom app_of_mine.run import main\nsys.exit(main())\n")
    environment = program_environment()
    environment["PYTHONPATH"] = ":".join([*sys.path[1:], environment["PYTHONPATH"]])
    done = subprocess.run(
        [python, *(["-m", "app_of_mine"] if how == "-m" else [command])],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    found = [json.loads(line) for line in must_succeed(done).splitlines()]
    assert found == [["run.py", 7, None], ["helping.py", 2, "brick.py"]]


def test_through_pandas_the_bytes_are_on_the_programs_lines() -> None:
    pytest.importorskip("pandas")
    found = shown_sites("""
        import pandas as pd
        bridge.install("host")
        frame = pd.DataFrame({"k": np.arange(200_000) % 97, "v": np.arange(200_000.0)})
        both = pd.concat([frame] * 4, ignore_index=True)
        merged = both.merge(frame.drop_duplicates("k"), on="k")
        kept = []
        frame.groupby("k").apply(lambda group: kept.append(np.empty(9)))
        show(merged["v_y"].to_numpy())
        show(kept[0])
        total = sum(usage.total_bytes for usage in bridge.stats().by("site").values())
        mine = sum(u.total_bytes for site, u in bridge.stats().by("site").items() if site.startswith(__file__))
        assert mine > 0.9 * total, bridge.stats().by("site")
    """)
    (merged, inner) = found
    assert (merged[1], inner[1:4]) == (15, [17, "<lambda>", None])
    assert "/site-packages/pandas/" in merged[3]


def test_cells_of_a_notebook_have_the_number_that_it_shows() -> None:
    """In a terminal and in a kernel, where they have names of files; in a function of another cell, and on its line."""
    pytest.importorskip("IPython")
    code = """
        from IPython.core.interactiveshell import InteractiveShell
        import IPython.core.compilerop, sys

        class Compiler(IPython.core.compilerop.CachingCompiler):
            def get_code_name(self, raw_code, code, number):
                return f"/tmp/ipykernel_7/{hash(raw_code)}.py" if sys.argv[1] == "kernel" else super().get_code_name(
                    raw_code, code, number)

        InteractiveShell.compiler_class = Compiler
        shell = InteractiveShell.instance()
        for cell in (
            "import numpy as np, rmm_managed_bridge as bridge\\nbridge.install('host')",
            "def make():\\n    return np.empty(9)",
            "a = make()\\nb = np.ones(9)",
            "print(bridge.allocation_of(a).site.place, bridge.allocation_of(b).site)",
            "print('In [2]:2' in bridge.stats().by('site'), 'In [2]:2' in str(bridge.snapshot()))",
        ):
            shell.run_cell(cell, store_history=True).raise_error()
    """
    for where in "terminal", "kernel":
        out = must_succeed(run_python(code, where, options=("-W", "ignore")))
        shown = r"In \[2\]:2 In \[3\]:2 \(<module>\) via numpy/_core/numeric.py:\d+\nTrue True\n$"
        assert re.search(shown, out), out


def test_a_resource_that_was_only_constructed_knows_whose_is_whose() -> None:
    found = shown_sites("""
        import concurrent.futures
        from helpers.programs import HostMemory
        resource = bridge.ManagedBridgeResource(HostMemory().resource)
        show(resource.allocate(1 << 20))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            show(pool.submit(resource.allocate, 1 << 20).result())
    """)
    own, library = found
    assert own[1:] == [14, "<module>", None, False]
    assert (library[0].rpartition("/")[2], library[3:]) == ("thread.py", [None, True])


def test_what_is_installed_beside_the_program_is_a_library(tmp_path: Path) -> None:
    """As `pip install --target .` does, for a function that is sent to others as one folder."""
    (tmp_path / "brick.py").write_text(MAKE)
    make_package(tmp_path, "bricks", {"wall.py": MAKE})
    (tmp_path / "helping.py").write_text(
        "import brick, bricks.wall\ndef make(): return brick.make(), bricks.wall.make()\n"
    )
    info = tmp_path / "bricks-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("brick.py,,\nbricks/__init__.py,,\nbricks/wall.py,,\nbricks-1.0.dist-info/RECORD,,\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nimport helping, rmm_managed_bridge as bridge\n"
        "bridge.install('host')\n"
        "for array in helping.make():\n"
        "    site = bridge.allocation_of(array).site\n"
        "    print(os.path.basename(site.file), site.via and os.path.basename(site.via.file))\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=program_environment(), check=False
    )
    assert must_succeed(done).splitlines() == ["helping.py brick.py", "helping.py wall.py"]
