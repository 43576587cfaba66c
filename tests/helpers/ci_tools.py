"""The scripts of ci/tools, imported or run as CI does."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """Import a script of ci/tools, which is no package."""
    spec = importlib.util.spec_from_file_location(f"ci_tools_{name}", ROOT / "ci" / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script of ci/tools as CI does."""
    script = ROOT / "ci" / "tools" / f"{name}.py"
    command = [sys.executable, "-P", str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write `files` under `folder` and return it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
