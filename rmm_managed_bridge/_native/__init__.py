"""The native modules. Without them, as in a checkout that was not built in place, the import says what to do."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("rmm_managed_bridge._native.pool") is None:
    raise ImportError(
        f"{__path__[0]} holds no native modules for Python {sys.version_info[0]}.{sys.version_info[1]}. If this is a "
        "checkout, it hides the package that 'pip install .' installed: run from another folder, or with 'python -P'. "
        "CONTRIBUTING.md says how to build in place"
    )


def library_path() -> Path:
    """Return the shared library behind the modules, which frameworks load C functions from by name."""
    return Path(__file__).with_name("librmm_managed_bridge.so")
