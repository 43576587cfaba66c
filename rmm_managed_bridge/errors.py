"""Errors and warnings of the bridge.

Out of memory is not in this family: it stays :class:`MemoryError` (and CuPy's own class in CuPy), because that is
what callers of an allocator catch.
"""

import warnings

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
]


class BridgeError(Exception):
    """Base of every error that the bridge raises itself."""


class BridgeWarning(UserWarning):
    """Something that the user should know and that the bridge could not raise."""


class ConfigError(BridgeError, ValueError):
    """An argument, or the environment variable that stands for it, cannot be used."""


class BackendError(BridgeError, RuntimeError):
    """The memory that was asked for does not exist on this machine, or not in this process."""


class InstallError(BridgeError, RuntimeError):
    """`install` or `uninstall` could not do all that was asked, and left everything as it was."""


class FrameworkError(InstallError):
    """A framework that was asked for is unknown, missing, or cannot be hooked here."""


class ForeignPointerError(BridgeError, ValueError):
    """A pointer that is not the start of a live block was freed. Nothing was freed."""


class AccessError(BridgeError, RuntimeError):
    """Memory cannot be reached from where it was asked for, or not be exported to another process."""


class ViewError(BridgeError, TypeError):
    """A view without a copy is not possible for this object."""


def renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that `old` is spelled `new` now, at the line that is `stacklevel` calls up.

    A `FutureWarning`, which is shown wherever it comes from, since the old spelling ends with the next release: a
    `DeprecationWarning` is shown for ``__main__`` alone.
    """
    text = f"{old} is {new} now; the old spelling goes with the next release"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)
