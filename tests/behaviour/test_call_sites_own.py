"""The line that a call site names is the program's own, wherever a library has its part in it."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
from helpers.shown_sites import MAKE, make_package, shown_sites

import rmm_managed_bridge as bridge

pytestmark = pytest.mark.behaviour("P6")


@pytest.fixture
def installed_library(tmp_path: Path) -> Path:
    """Return a folder ``site-packages`` with a package "bricks" and a module "mortar"."""
    site = tmp_path / "site-packages"
    make_package(site, "bricks", {"__init__.py": "from bricks.making import make, call", "making.py": MAKE})
    (site / "mortar.py").write_text(MAKE)
    return site


def test_an_installed_package_is_passed_and_named_beside(installed_library: Path) -> None:
    found = shown_sites(
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
    found = shown_sites(
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
    found = shown_sites(
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
    make_package(work, "warp", {"__init__.py": MAKE})
    make_package(tmp_path / "elsewhere" / "src", "editable", {"__init__.py": MAKE})
    (installed_library / "editable.pth").write_text(f"{tmp_path / 'elsewhere' / 'src'}\n")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("packed.py", MAKE)
    found = shown_sites(
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
    found = shown_sites("""
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
    found = shown_sites("""
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


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_libraries_are_added_and_taken_away(how: str, tmp_path: Path, installed_library: Path) -> None:
    make_package(tmp_path / "work", "ours", {"__init__.py": "", "inner.py": MAKE, "outer.py": MAKE})
    for file in ("a.py", "folder/b.py"):
        path = tmp_path / "work" / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(MAKE)
    libraries = f"ours.inner, {tmp_path}/work/folder,-bricks,{tmp_path}/work/a.py"
    found = shown_sites(
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
