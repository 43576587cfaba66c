"""The checks of layers let a package in order through, and each rule rejects the example made here."""

import re
from pathlib import Path

import pytest
from helpers.ci_tools import ROOT, load, write

GOOD_PACKAGE = {
    "__init__.py": "from rmm_managed_bridge.lifecycle.install import install\n",
    "errors.py": "",
    "units.py": "from rmm_managed_bridge.errors import ConfigError\n",
    "records.py": "import rmm_managed_bridge.units\n",
    "lifecycle/install.py": (
        "from rmm_managed_bridge import adapters, records\nfrom rmm_managed_bridge.adapters import cupy\n"
    ),
    "adapters/__init__.py": "def load():\n    from rmm_managed_bridge.adapters import cupy\n",
    "adapters/cupy.py": "def hook():\n    import cupy\n    from rmm_managed_bridge.adapters.cupy_errors import why\n",
    "adapters/cupy_errors.py": "",
    "_native/ledger.pyx": "cimport numpy\nfrom rmm_managed_bridge._native.base cimport Base, \\\n    Other\n",
    "_native/base.pxd": "from libcpp.memory cimport shared_ptr\ncdef extern from 'ledger.hpp':\n    pass\n",
    "reports/table.py": "from rmm_managed_bridge.reports.text import align\n",
    "reports/text.py": "from rmm_managed_bridge.records import Stats\n",
    "cli/demo.py": "import numpy\nimport rmm_managed_bridge as bridge\nfrom rmm_managed_bridge import errors\n",
    "__main__.py": "from rmm_managed_bridge.cli.demo import demo\n",
}

VIEW = "views/numpy.py"
LATE = "_native/late.pyx"
BAD_IMPORTS = [
    ("errors.py", "import rmm_managed_bridge.units", 1, "errors must not import units"),
    ("units.py", "from rmm_managed_bridge import records", 1, "units must not import records"),
    ("units.py", "def late():\n    from rmm_managed_bridge.config import X\n", 2, "units must not import config"),
    ("config.py", "if TYPE_CHECKING:\n    import rmm_managed_bridge.views.numpy", 2, "config must not import views"),
    ("config.py", "import importlib\nimportlib.import_module('rmm_managed_bridge.cli')", 2, "must not import cli"),
    (VIEW, "from rmm_managed_bridge import adapters", 1, "move what both need to a room below views"),
    ("tags.py", "from rmm_managed_bridge import overview", 1, "tags must not import overview"),
    ("lifecycle/pools.py", "from rmm_managed_bridge import as_numpy", 1, "lifecycle must not import __init__"),
    ("__init__.py", "from rmm_managed_bridge.cli.demo import demo", 1, "__init__ must not import cli"),
    (VIEW, "import rmm_managed_bridge", 1, "views must not import __init__"),
    (VIEW, "from .records import Allocation", 1, "relative import"),
    (VIEW, "try:\n    import cupy\nexcept ImportError:\n    pass", 2, "imports cupy at module level"),
    (VIEW, "class View:\n    from warp.types import array", 2, "imports warp.types at module level"),
    (VIEW, "if not TYPE_CHECKING:\n    import torch", 2, "imports torch at module level"),
    ("__init__.py", "def late():\n    import cupy", 2, "imports cupy in the package's __init__"),
    ("adapters/warp.py", "from rmm_managed_bridge.adapters.cupy import hook", 1, "adapters never import each other"),
    ("adapters/warp.py", "from rmm_managed_bridge.adapters import cupy", 1, "adapters never import each other"),
    ("reports/rows.py", "from rmm_managed_bridge._native import ledger", 1, "reports must not import _native"),
    (LATE, "def f(\n        a):  # no (\n    import os; import rmm_managed_bridge.views.numpy", 3, "views"),
    (LATE, "from rmm_managed_bridge.lifecycle cimport (  # why\n    A,\n    B)\n", 1, "lifecycle"),
    (LATE, "'''\nimport warp\n'''\nfrom cupy cimport x", 4, "imports cupy at module level"),
    (LATE, "cdef class A:\n    '''\n    Text (\n    '''\n    pass\nimport torch", 6, "imports torch"),
    ("_native/late.pxd", "from .base cimport Base", 1, "relative import"),
    ("extra.py", "", 1, "extra is in no layer"),
    ("records.py", "import rmm_managed_bridge.units\ndef f():\n    import rmm_managed_bridge.views", 3, "views"),
    (
        "reports/text.py",
        "def f():\n    from rmm_managed_bridge.reports.table import x",
        2,
        "imports in a circle, also inside functions: reports.text -> reports.table -> reports.text",
    ),
    ("_native/base.pxd", "cimport rmm_managed_bridge._native.ledger", 1, "imports in a circle"),
]


def test_layers_accept_a_package_in_order(tmp_path: Path) -> None:
    """The good package shows each form that is allowed."""
    assert load("check_layers").check(write(tmp_path, GOOD_PACKAGE)) == []


@pytest.mark.parametrize(("name", "text", "line", "wrong"), BAD_IMPORTS)
def test_layers_reject(tmp_path: Path, name: str, text: str, line: int, wrong: str) -> None:
    """One bad import in a good package is the one finding, on its line."""
    findings = load("check_layers").check(write(tmp_path, {**GOOD_PACKAGE, name: text}))
    assert findings
    for finding in findings:
        if "in a circle" not in finding:  # which is found where the search for one began
            assert finding.startswith(f"{tmp_path / name}:{line}: ")
        assert wrong.split(":", maxsplit=1)[0] in finding


def test_layers_let_cython_functions_import_frameworks(tmp_path: Path) -> None:
    """A function's own import is lazy in Cython too, also behind a signature of several lines."""
    text = "cdef class A:\n    def f(self,\n          b=(1, 2)):\n        import cupy\n\ncpdef g():\n    import warp\n"
    assert load("check_layers").check(write(tmp_path, {"_native/a.pyx": text})) == []


def test_layers_let_a_listed_module_hold_a_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that cannot be without a framework may be listed; others must then import it lazily."""
    tool = load("check_layers")
    files = {"cli/kernel.py": "import warp", "cli/demo.py": "def f():\n    from rmm_managed_bridge.cli import kernel\n"}
    assert len(tool.check(write(tmp_path, files))) == 1
    monkeypatch.setitem(tool.FRAMEWORK_MODULES, "cli.kernel", "a kernel is a decorated function")
    assert tool.check(tmp_path) == []
    write(tmp_path, {"cli/main.py": "from rmm_managed_bridge.cli.kernel import launch\n"})
    assert "imports cli.kernel at module level" in "".join(tool.check(tmp_path))


def test_layers_are_those_of_the_package_and_of_the_page() -> None:
    """No room is listed that is gone, and docs/design/layers.md has the same order, of Python and of C++."""
    layers = load("check_layers").LAYERS
    package = ROOT / "rmm_managed_bridge"
    rooms = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    assert {room for layer in layers for room in layer} == rooms
    assert len(rooms) <= 20, "a room of its own needs a reason: look for one that has the subject already"
    page = (ROOT / "docs" / "design" / "layers.md").read_text(encoding="utf-8")
    python, native = page.split("## C++")
    rows = [line.split("|")[2] for line in python.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [tuple(re.findall(r"`(\w+)`", row)) for row in rows] == list(layers)
    assert set(re.findall(r"^- `(\w+)`: ", python, re.MULTILINE)) == rooms
    assert tuple(re.findall(r"^\| \d+ \| `(\w+)` \|", native, re.MULTILINE)) == load("check_includes").FOLDERS


def folders() -> dict[str, str]:
    """Return a small tree of C++ that is in order."""
    names = load("check_includes").FOLDERS
    return {
        "cpp/README.md": "".join(f"| `{name}` | what |\n" for name in names),
        "cpp/base/lock.hpp": "#include <atomic>\n",
        "cpp/driver/driver.hpp": "#include <cuda.h>\n",
        "cpp/pool/pool.hpp": '#include "base/lock.hpp"\n#include "driver/driver.hpp"\n',
        "cpp/pool/free.cpp": '#include "pool/pool.hpp"\n',
        "cpp/entry/rmm.hpp": '#include <rmm/error.hpp>\n#include "pool/pool.hpp"\n',
        "cpp/entry/interpreter.hpp": "#include <Python.h>\n",
        "pool.pyx": 'cdef extern from "pool/pool.hpp" nogil:\n    pass\ncdef extern from "cuda.h":\n    pass\n',
    }


def test_includes_accept_a_tree_in_order(tmp_path: Path) -> None:
    """Down, within a folder, and what one folder alone may name."""
    assert load("check_includes").check(write(tmp_path, folders())) == []


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("cpp/base/lock.hpp", '#include "pool/pool.hpp"', "base must not include pool/pool.hpp"),
        ("cpp/base/lock.hpp", '#include "lock.hpp"', "which is no file here; write folder/file.hpp"),
        ("cpp/pool/front.hpp", "#include <Python.h>", "the interpreter is met in entry/ alone"),
        ("cpp/pool/front.hpp", "#include <cuda.h>", "called through the table"),
        ("cpp/entry/cupy.hpp", "#include <rmm/error.hpp>", "one module is linked to RMM"),
        ("cpp/driver/driver.hpp", '#include "driver/driver.hpp"', "includes in a circle"),
        ("cpp/base/clock.hpp", '#include "base/spin.hpp"', "no file here"),
        ("cpp/heap.hpp", "", "not in one of the folders"),
        ("cpp/other/heap.hpp", "", "not in one of the folders"),
        ("cpp/README.md", "| `base` | |", "lists the folders base, not base, driver"),
        ("ledger.pyx", 'cdef extern from "ledger/gone.hpp":', "declares from 'ledger/gone.hpp'"),
    ],
)
def test_includes_reject(tmp_path: Path, name: str, text: str, wrong: str) -> None:
    """One flaw in a tree in order is the one finding, in its file."""
    (finding,) = load("check_includes").check(write(tmp_path, {**folders(), name: text}))
    assert wrong in finding
    assert finding.startswith(f"{tmp_path / name}:")


def test_includes_reject_two_that_need_each_other(tmp_path: Path) -> None:
    """Directly, or by way of a third one."""
    files = {**folders(), "cpp/pool/a.hpp": '#include "pool/b.hpp"', "cpp/pool/b.hpp": '#include "pool/c.hpp"'}
    check = load("check_includes").check
    for last in ("a", "b"):
        (finding,) = check(write(tmp_path, {**files, "cpp/pool/c.hpp": f'#include "pool/{last}.hpp"'}))
        assert "includes in a circle: " in finding


def test_includes_reject_an_empty_folder(tmp_path: Path) -> None:
    """The folder must hold C++."""
    assert len(load("check_includes").check(tmp_path)) == 1
