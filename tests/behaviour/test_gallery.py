"""The programs of docs/gallery run without a GPU, and say what they are there to show."""

import pytest
from helpers.documents import ROOT
from helpers.programs import run_python, silent_stderr

FOLDER = ROOT / "docs/gallery"
SHOWN = {
    "fork_and_workers.py": "child read its parent's array: True",
    "hints.py": "prefetch skipped: host memory",
    "limits.py": "tag 'load' has 0 B live of 8.00 MiB",
    "shared_pool.py": "[0. 2. 4. 6.]\nTrue host",
    "streams.py": "[1. 1. 1.]",
    "who_holds_it.py": "<15.3 MiB more: 2 added, 0 freed, 0 resized>",
}

pytestmark = pytest.mark.behaviour("U4")


def test_every_program_is_run_and_on_the_page() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.py")) == sorted(SHOWN)
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"```{{literalinclude}} {name}\n" in page for name in SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_each_runs_without_a_gpu(name: str) -> None:
    code = (FOLDER / name).read_text(encoding="utf-8")
    if "warp" in code:
        pytest.importorskip("warp")
    # Warp's compiler leaves a folder to its finalizer, which is a ResourceWarning.
    options = ("-W", "error", "-W", "ignore::ResourceWarning")
    done = run_python(code, options=options, timeout=120)
    assert (done.returncode, silent_stderr(done)) == (0, ""), done.stderr
    assert SHOWN[name] in done.stdout
