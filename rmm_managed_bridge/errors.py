"""Errors and warnings of the bridge.

Out of memory is not in this family: it stays :class:`MemoryError` (and CuPy's own class in CuPy), because that is
what callers of an allocator catch.
"""

import contextlib
import os
import reprlib
import sys
import warnings
from pathlib import Path
from typing import Any

__all__ = [
    "AccessError",
    "BackendError",
    "BridgeError",
    "BridgeWarning",
    "ConfigError",
    "ForeignPointerError",
    "FrameworkError",
    "InstallError",
    "ViewError",
    "is_array",
    "shown",
    "warn_renamed",
    "warn_user",
]

_LONGEST_SHOWN = 100
_NOT_THE_USERS = (f"{Path(__file__).parent}{os.sep}", contextlib.__file__, "<frozen importlib")


class BridgeError(Exception):
    """Base of every error that the bridge raises itself.

    Examples
    --------
    One ``except`` for all of them; out of memory is a `MemoryError` and not among them.

    >>> try:
    ...     bridge.install("host", pool="sometimes")
    ... except bridge.BridgeError as error:
    ...     print(type(error).__name__)
    ConfigError
    """


class BridgeWarning(UserWarning):
    """Something that the user should know and that the bridge could not raise.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as said, bridge.installed("host"):
    ...     warnings.simplefilter("always")
    ...     bridge.reset_peak()
    >>> [warning.category for warning in said]  # nothing to say
    []
    """


class ConfigError(BridgeError, ValueError):
    """An argument, or the environment variable that stands for it, cannot be used.

    Examples
    --------
    >>> try:
    ...     bridge.tag("load", limit="2 apples")
    ... except bridge.ConfigError as error:
    ...     print(error)
    limit='2 apples' is not a size; write an integer of bytes, or text such as '512MiB' or '2GiB'
    """


class BackendError(BridgeError, RuntimeError):
    """The memory that was asked for does not exist on this machine, or not in this process.

    Examples
    --------
    >>> bridge.uninstall()
    >>> try:
    ...     installed = bridge.install("managed", initial_pool_size="256MiB")
    ... except bridge.BackendError:  # no device
    ...     installed = bridge.install("host")
    >>> bridge.status().installed
    True
    """


class InstallError(BridgeError, RuntimeError):
    """`install` or `uninstall` could not do all that was asked, and left everything as it was.

    Examples
    --------
    >>> try:
    ...     bridge.install("host", track="off")
    ... except bridge.InstallError as error:
    ...     print(error)
    the bridge is installed with other settings: track='off' (is 'sites'); call uninstall() first
    """


class FrameworkError(InstallError):
    """A framework that was asked for is unknown, missing, or cannot be hooked here.

    Examples
    --------
    >>> try:
    ...     bridge.install("host", frameworks=["nunpy"])
    ... except bridge.FrameworkError as error:
    ...     print(error)
    frameworks: 'nunpy' is not a framework the bridge knows; use numpy, cupy, warp, torch
    """


class ForeignPointerError(BridgeError, ValueError):
    """A pointer that is not the start of a live block was freed. Nothing was freed.

    Examples
    --------
    It is a `ValueError` too, as other wrong arguments are.

    >>> issubclass(bridge.ForeignPointerError, ValueError)
    True
    """


class AccessError(BridgeError, RuntimeError):
    """Memory cannot be reached from where it was asked for, or not be exported to another process.

    Examples
    --------
    >>> try:
    ...     bridge.ipc_handle(np.ones(1000))
    ... except bridge.AccessError as error:
    ...     print(str(error)[:13])
    no IPC handle
    """


class ViewError(BridgeError, TypeError):
    """A view without a copy is not possible for this object.

    Examples
    --------
    It is a `TypeError` too.

    >>> try:
    ...     bridge.as_numpy("text")
    ... except bridge.ViewError as error:
    ...     print(type(error).__name__)
    ViewError
    """


class _Shown(reprlib.Repr):
    """`repr` in a line, in which an array is its type, shape and dtype: its elements may be many, and on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _LONGEST_SHOWN

    def repr1(self, x: Any, level: int) -> str:
        if is_array(x):
            return f"{type(x).__name__} of shape {tuple(x.shape)}, {x.dtype}"
        return super().repr1(x, level)


def is_array(x: object) -> bool:
    """Return True for what has a shape and a dtype. Its elements are not looked at."""
    return not isinstance(x, type) and hasattr(x, "shape") and hasattr(x, "dtype")


def shown(value: object) -> str:
    """Return what an error says of a value that was given: as it was typed, if that is no longer than a line."""
    return _Shown().repr(value)


def warn_user(message: str, category: type[Warning] = BridgeWarning) -> None:
    """Warn at the line of the program that called the bridge, through however many frames of the bridge."""
    frame = sys._getframe()
    # Not a stacklevel: `from ... import`, `installed` and a bare call have different numbers of frames between.
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def warn_renamed(old: str, new: str) -> None:
    """Say, at the line of the program that wrote `old`, that it is called `new` now.

    A `FutureWarning`, since Python hides a `DeprecationWarning` from everyone but ``__main__``: whoever sets the
    environment of a program, or has it in modules of its own, would first hear of it when the old spelling is gone.
    """
    warn_user(f"{old} is called {new} now, and goes with the next release; write {new}", FutureWarning)
