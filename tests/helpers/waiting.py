"""Waiting for what another thread does."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 30.0


def eventually(condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> bool:
    """Return True once `condition()` is true; False if it is not within half a minute, or as many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
