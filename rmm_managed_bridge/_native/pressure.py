"""Making room in Python for a request that the pool could not serve."""

import gc
import threading
from collections.abc import Callable

OnOom = Callable[[int, int], object]

on_oom: OnOom | None = None
"""The user's callback. Set by `install` alone."""

collect_garbage: Callable[[], object] = gc.collect
"""A test of thousands of failures, whose garbage has no blocks, does without."""

_thread_state = threading.local()


def relieve(size_bytes: int, attempt: int, may_collect: bool) -> bool:
    """Return True if the request for `size_bytes` should be tried again, after `attempt` tries again.

    Collects garbage once, where that is allowed, and then asks the user's callback. What the callback itself cannot
    get is not asked for again: it sees the error.
    """
    if getattr(_thread_state, "inside", False):
        return False
    _thread_state.inside = True
    _thread_state.error = None
    try:
        if may_collect and attempt == 0:
            collect_garbage()
            return True
        callback = on_oom
        return callback is not None and bool(callback(size_bytes, attempt if may_collect else attempt + 1))
    except Exception as error:  # goes into the MemoryError: see `callback_error`
        _thread_state.error = error
        return False
    finally:
        _thread_state.inside = False


def callback_error() -> Exception | None:
    """Return what the callback raised in the last attempt on this thread, once."""
    error = getattr(_thread_state, "error", None)
    _thread_state.error = None
    return error
