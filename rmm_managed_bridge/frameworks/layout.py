"""What the frameworks here tell of an array without going through a protocol."""

from typing import Any

import numpy as np

Layout = tuple[int, tuple[int, ...], tuple[int, ...] | None, "np.dtype[Any]", bool]
"""The address of element 0, shape, strides in bytes (None: C's order), dtype, and whether it is read-only."""
