"""Which files are not the user's, so that a call site names the line that a user would look for."""

import importlib.util
import os
from pathlib import Path

from rmm_managed_bridge.frameworks.registry import INTERNAL


def internal_prefixes() -> list[str]:
    """Return the folders and files of the bridge and of the frameworks, without importing any of them.

    The bridge's command line counts as a user: its demo is a program like any other.
    """
    package = Path(__file__).parents[1]
    ours = (path for path in package.iterdir() if path.name not in ("cli", "__main__.py", "__pycache__"))
    prefixes = [f"{path}{os.sep}" if path.is_dir() else str(path) for path in ours]
    for name in INTERNAL:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        for location in (spec.submodule_search_locations or ()) if spec else ():
            prefixes.append(f"{location}{os.sep}")
    prefixes.extend(("<frozen ", "<__array_function__"))
    return prefixes
