"""NumPy: arrays on the CPU, without streams."""

from typing import Any


def owns_memory(x: Any) -> bool | None:
    """Return whether NumPy made the memory of an array, or of the one that it is a view of; None if it is no array."""
    if not hasattr(x, "flags"):
        return None
    while type(base := getattr(x, "base", None)).__module__.partition(".")[0] == "numpy":
        x = base
    return bool(x.flags.owndata)
