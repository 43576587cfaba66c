"""The line that a call site names is the program's own, wherever a library has its part in it."""

import json
import re
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from helpers.programs import must_succeed, program_environment, run_python

import rmm_managed_bridge as bridge

pytestmark = pytest.mark.behaviour("P6")

PROGRAM = """
    import json
    import numpy as np
    import rmm_managed_bridge as bridge

    def show(array):
        site = bridge.allocation_of(array).site
        via = site.via
        print(json.dumps([site.file, site.line, site.function, via and via.file, site.library]))
"""
MAKE = "import numpy as np\ndef make(): return np.empty(9)\ndef call(function): return function()\n"


def _run(program: str, *arguments: object, path: Path | None = None, **variables: str) -> list[list[Any]]:
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    environment = program_environment() | variables
    if path is not None:
        environment["PYTHONPATH"] = f"{path}:{environment['PYTHONPATH']}"
    done = run_python(code, *arguments, environment=environment)
    return [json.loads(line) for line in must_succeed(done).splitlines()]


def _package(folder: Path, name: str, files: dict[str, str]) -> Path:
    (folder / name).mkdir(parents=True)
    for file, text in {"__init__.py": "", **files}.items():
        (folder / name / file).write_text(text)
    return folder / name


@pytest.fixture
def installed_library(tmp_path: Path) -> Path:
    """Return a folder ``site-packages`` with a package "bricks" and a module "mortar"."""
    site = tmp_path / "site-packages"
    _package(site, "bricks", {"__init__.py": "from bricks.making import make, call", "making.py": MAKE})
    (site / "mortar.py").write_text(MAKE)
    return site


def test_an_installed_package_is_passed_and_named_beside(installed_library: Path) -> None:
    found = _run(
        """
        import bricks, mortar, threading
        bridge.install("host")
        def own():
            show(bricks.make())
            show(mortar.call(bricks.make))
            show(bricks.call(lambda: np.empty(9)))
            show(np.empty(9))
        own()
        made = []
        thread = threading.Thread(target=lambda: made.append(bricks.make()))
        thread.start()
        thread.join()
        show(made[0])
        """,
        path=installed_library,
    )
    making = str(installed_library / "bricks" / "making.py")
    lines = [(line, function, via, library) for _, line, function, via, library in found]
    start = lines[0][0]
    assert {file.rpartition("/")[2] for file, *_ in found} == {"program.py"}
    assert lines == [
        (start, "own", making, False),
        (start + 1, "own", making, False),
        (start + 2, "own.<locals>.<lambda>", None, False),
        (start + 3, "own", None, False),
        (start + 6, "<lambda>", making, False),
    ]


def test_without_a_line_of_the_programs_it_is_the_librarys_and_says_so(installed_library: Path) -> None:
    found = _run(
        """
        import bricks, concurrent.futures
        bridge.install("host")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            array = pool.submit(bricks.make).result()
        show(array)
        assert str(bridge.allocation_of(array).site).endswith("bricks/making.py:2 (library)")
        """,
        path=installed_library,
    )
    assert found == [[str(installed_library / "bricks" / "making.py"), 2, "make", None, True]]


def test_a_walk_ends(installed_library: Path) -> None:
    """Deeper in a library than anybody looks, it is the library's line."""
    (installed_library / "deep.py").write_text(
        "import numpy as np\ndef down(n):\n    return np.empty(9) if n == 0 else down(n - 1)\n"
    )
    found = _run(
        """
        import deep
        bridge.install("host")
        show(deep.down(100))
        show(deep.down(200))
        """,
        path=installed_library,
    )
    assert [(file.rpartition("/")[2], line, library) for file, line, _, _, library in found] == [
        ("program.py", 13, False),
        ("deep.py", 3, True),
    ]


def test_what_is_not_installed_is_the_programs(tmp_path: Path, installed_library: Path) -> None:
    """Also where it is called as a library is, lies in an archive, or was never in a file."""
    work = tmp_path / "work"
    _package(work, "warp", {"__init__.py": MAKE})
    _package(tmp_path / "elsewhere" / "src", "editable", {"__init__.py": MAKE})
    (installed_library / "editable.pth").write_text(f"{tmp_path / 'elsewhere' / 'src'}\n")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("packed.py", MAKE)
    found = _run(
        """
        import sys, site
        work, library, archive = sys.argv[1:]
        sys.path[:0] = [work, archive]
        site.addsitedir(library)
        import warp, editable, packed
        bridge.install("host", frameworks=["numpy"])
        for each in warp, editable, packed:
            show(each.make())
        names = {"np": np}
        exec("def make():\\n  return np.empty(9)", names)
        show(names["make"]())
        exec(compile("made = np.empty(9)", "/tmp/ipykernel_7/123.py", "exec"), names)
        show(names["made"])
        """,
        work,
        installed_library,
        tmp_path / "packed.zip",
    )
    assert [(file, line) for file, line, *_ in found] == [
        (str(work / "warp" / "__init__.py"), 2),
        (str(tmp_path / "elsewhere" / "src" / "editable" / "__init__.py"), 2),
        (str(tmp_path / "packed.zip" / "packed.py"), 2),
        ("<string>", 2),
        ("/tmp/ipykernel_7/123.py", 1),
    ]
    assert all(via is None and not library for *_, via, library in found)


def test_what_dataclasses_make_is_nobodys() -> None:
    found = _run("""
        import functools, collections
        from dataclasses import dataclass, field
        bridge.install("host")
        @dataclass
        class Made:
            array: object = field(default_factory=functools.partial(np.empty, 9))
        show(Made().array)
        Point = collections.namedtuple("Point", "x")
        show(Point(*(np.empty(9) for _ in range(1))).x)
    """)
    assert [(file.rpartition("/")[2], line, via) for file, line, _, via, _ in found] == [
        ("program.py", 17, None),
        ("program.py", 19, None),
    ]


def test_the_bridge_itself_is_no_place_at_all() -> None:
    found = _run("""
        bridge.install("host")
        @bridge.tag("made")
        def make():
            return np.empty(9)
        show(make())
        with bridge.tag("made"):
            show(bridge.as_numpy(np.empty(9)))
    """)
    assert [(line, function, via, library) for _, line, function, via, library in found] == [
        (14, "make", None, False),
        (17, "<module>", None, False),
    ]


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
    _package(site, "app_of_mine", {"__main__.py": "from app_of_mine.run import main\nmain()\n", "run.py": APPLICATION})
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


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_libraries_are_added_and_taken_away(how: str, tmp_path: Path, installed_library: Path) -> None:
    _package(tmp_path / "work", "ours", {"__init__.py": "", "inner.py": MAKE, "outer.py": MAKE})
    for file in ("a.py", "folder/b.py"):
        path = tmp_path / "work" / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(MAKE)
    libraries = f"ours.inner, {tmp_path}/work/folder,-bricks,{tmp_path}/work/a.py"
    found = _run(
        """
        import sys
        sys.path[:0] = [sys.argv[1], sys.argv[1] + "/folder"]
        import a, b, bricks, mortar, ours.inner, ours.outer
        bridge.install("host", **({"libraries": sys.argv[2]} if sys.argv[2] else {}))
        assert bridge.install("host").config.libraries[0] == "ours.inner"
        for each in a, b, bricks, mortar, ours.inner, ours.outer:
            show(each.make())
        """,
        tmp_path / "work",
        libraries if how == "argument" else "",
        path=installed_library,
        **({} if how == "argument" else {"RMM_BRIDGE_LIBRARIES": libraries}),
    )
    names = [(file.rpartition("/")[2], via and via.rpartition("/")[2]) for file, _, _, via, _ in found]
    assert names == [
        ("program.py", "a.py"),
        ("program.py", "b.py"),
        ("making.py", None),
        ("program.py", "mortar.py"),
        ("program.py", "inner.py"),
        ("outer.py", None),
    ]


def test_a_library_that_is_not_there_is_heard() -> None:
    with pytest.warns(bridge.BridgeWarning, match="no module or folder nowhere_at_all, /no/such/folder"):
        bridge.install("host", libraries=["nowhere_at_all", "-/no/such/folder", "json"])
    with pytest.raises(bridge.InstallError, match=r"libraries=.*uninstall\(\) first"):
        bridge.install("host", libraries="json")
    bridge.uninstall()


@pytest.mark.parametrize("libraries", ["", "a,,b", "-", [""], [3], 3, ["a\0b"]])
def test_what_is_no_list_of_libraries_is_refused(libraries: Any) -> None:
    with pytest.raises(bridge.ConfigError, match=r"libraries=.*names of modules or paths"):
        bridge.install("host", libraries=libraries)
    assert not bridge.status().installed


def test_through_pandas_the_bytes_are_on_the_programs_lines() -> None:
    pytest.importorskip("pandas")
    found = _run("""
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
