"""Making room in Python for a request that the pool could not serve."""

import gc
import inspect
import threading
from collections.abc import Callable

from rmm_managed_bridge.errors import ConfigError, shown

OnOom = Callable[[int, int], object]

on_oom: OnOom | None = None
"""The user's callback. Set by `install` alone."""

collect_garbage: Callable[[], object] = gc.collect
"""A test of thousands of failures, whose garbage has no blocks, does without."""

_thread_state = threading.local()


def require_callback(on_oom: object) -> None:
    """Refuse what could not be called when memory is out, which is too late to hear of it."""
    if not callable(on_oom):
        raise ConfigError(f"on_oom={shown(on_oom)} cannot be called; pass a function of (size_bytes, attempt)")
    try:
        signature = inspect.signature(on_oom)
    except (TypeError, ValueError):  # of native code, which does not always tell
        return
    try:
        signature.bind(0, 1)
    except TypeError as error:
        raise ConfigError(
            f"on_oom={shown(on_oom)} cannot be called with (size_bytes, attempt): {error}; give it these two parameters"
        ) from None


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
