"""Which files are not the user's, so that a call site names the line that a user would look for."""

import importlib.util
import os
from pathlib import Path

_FRAMEWORKS = ("numpy", "cupy", "cupyx", "cupy_backends", "warp", "torch", "rmm", "cudf", "numba")


def internal_prefixes() -> list[str]:
    """Return the folders and files of the bridge and of the frameworks, without importing any of them.

    The bridge's command line counts as a user: its demo is a program like any other.
    """
    package = Path(__file__).parent
    prefixes = [f"{package / 'adapters'}{os.sep}", f"{package / '_native'}{os.sep}"]
    prefixes.extend(str(path) for path in package.glob("*.py") if path.name != "__main__.py")
    for name in _FRAMEWORKS:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        for location in (spec.submodule_search_locations or ()) if spec else ():
            prefixes.append(f"{location}{os.sep}")
    prefixes.extend(("<frozen ", "<__array_function__"))
    return prefixes
