"""Seeing every `rmm.reinitialize`, before and after the change."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

Around = Callable[[Callable[[], None], Sequence[int]], None]

_around: Around | None = None
_wrapped: Callable[..., None] | None = None
"""What ours stands in front of: RMM's own function, or what somebody else put there."""
_innermost: Callable[..., None] | None = None
"""What was there first. If somebody's wrapper around ours is wrapped in turn, ours is called twice in one call."""
_thread = threading.local()


def watch(around: Around) -> None:
    """Call ``around(change, devices)`` for each `rmm.reinitialize`, until `unwatch`; it must call ``change()`` once.

    RMM's own hooks run before the change only, and with them alone RMM would go on with memory that nobody tracks. So
    the function that `reinitialize` calls for the change is wrapped: `rmm.rmm` looks it up by name at each call, also
    when `reinitialize` itself was imported into another module before.
    """
    global _around, _wrapped, _innermost
    import rmm.rmm

    _around = around
    if rmm.rmm._initialize is not _watched:
        _wrapped = rmm.rmm._initialize
        _innermost = _innermost or _wrapped
        rmm.rmm._initialize = _watched


def unwatch() -> None:
    """Let RMM be as it was. A wrapper that somebody put around ours stays, and ours then only passes on."""
    global _around
    import rmm.rmm

    _around = None
    if rmm.rmm._initialize is _watched:
        rmm.rmm._initialize = _wrapped  # type: ignore[assignment]


def _watched(*args: Any, **kwargs: Any) -> None:
    assert _wrapped is not None and _innermost is not None
    if getattr(_thread, "inside", False):
        _innermost(*args, **kwargs)
        return
    change = functools.partial(_wrapped, *args, **kwargs)
    _thread.inside = True
    try:
        if _around is None:
            change()
        else:
            devices = kwargs.get("devices", 0)
            _around(change, [0] if devices is None else [devices] if isinstance(devices, int) else list(devices))
    finally:
        _thread.inside = False
