"""The native modules. Without them, as in a checkout that was not built in place, the import says what to do."""

import importlib.util
import sys

if importlib.util.find_spec("rmm_managed_bridge._native.core") is None:
    raise ImportError(
        f"{__path__[0]} holds no native modules for Python {sys.version_info[0]}.{sys.version_info[1]}. If this is a "
        "checkout, it hides the package that 'pip install .' installed: run from another folder, or with 'python -P'. "
        "CONTRIBUTING.md says how to build in place"
    )
