"""NumPy: arrays on the CPU, without streams."""

from collections.abc import Callable
from typing import Any

from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge.frameworks.layout import Layout

layout_of: Callable[[Any], Layout] = numpy_handler.describe


def owns_memory(x: Any) -> bool | None:
    """Return whether NumPy made the memory of an array, or of the one that it is a view of; None if it is no array."""
    if not hasattr(x, "flags"):
        return None
    while type(base := getattr(x, "base", None)).__module__.partition(".")[0] == "numpy":
        x = base
    return bool(x.flags.owndata)
