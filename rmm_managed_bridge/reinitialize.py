"""Seeing every `rmm.reinitialize`, before and after the change."""

from collections.abc import Callable, Sequence
from typing import Any

Around = Callable[[Callable[[], None], Sequence[int]], None]

_around: Around | None = None
_original: Callable[..., None] | None = None


def watch(around: Around) -> None:
    """Call ``around(change, devices)`` for each `rmm.reinitialize`, until `unwatch`; it must call ``change()`` once.

    RMM's own hooks run before the change only, and with them alone RMM would go on with memory that nobody tracks. So
    the function that `reinitialize` calls for the change is wrapped: `rmm.rmm` looks it up by name at each call, also
    when `reinitialize` itself was imported into another module before.
    """
    global _around, _original
    import rmm.rmm

    _around = around
    if _original is None:
        _original = rmm.rmm._initialize
        rmm.rmm._initialize = _watched


def unwatch() -> None:
    """Let RMM be as it was. A wrapper that somebody put around ours stays, and ours then only passes on."""
    global _around, _original
    import rmm.rmm

    _around = None
    if _original is not None and rmm.rmm._initialize is _watched:
        rmm.rmm._initialize = _original
        _original = None


def _watched(*args: Any, **kwargs: Any) -> None:
    original = _original
    assert original is not None
    if _around is None:
        original(*args, **kwargs)
        return
    devices = kwargs.get("devices", 0)
    numbers = [0] if devices is None else [devices] if isinstance(devices, int) else list(devices)
    _around(lambda: original(*args, **kwargs), numbers)
