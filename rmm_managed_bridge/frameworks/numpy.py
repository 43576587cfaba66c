"""NumPy: arrays on the CPU, without streams."""

from typing import Any

from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge.frameworks.layout import Layout


def layout_of(x: Any) -> Layout:
    """Return how a NumPy array lies in memory. Raise TypeError if it is none."""
    return numpy_handler.describe(x)


def owns_memory(x: Any) -> bool | None:
    """Return whether NumPy made the memory of an array, or of the one that it is a view of; None if it is no array."""
    if not hasattr(x, "flags"):
        return None
    while type(base := getattr(x, "base", None)).__module__.partition(".")[0] == "numpy":
        x = base
    return bool(x.flags.owndata)
