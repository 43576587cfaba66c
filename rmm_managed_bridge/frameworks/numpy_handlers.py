"""Which handler NumPy's new arrays get (NEP 49)."""

import numpy as np

from rmm_managed_bridge._native import numpy_handler

_NUMPYS_OWN = "default_allocator"


def foreign_handler() -> str | None:
    """Return the name of this context's handler, if it is neither NumPy's own nor the bridge's."""
    name = str(np._core.multiarray.get_handler_name())  # type: ignore[attr-defined]
    return None if name in (numpy_handler.NAME, _NUMPYS_OWN) else name
