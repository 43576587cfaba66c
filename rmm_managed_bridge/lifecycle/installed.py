"""`installed`: a bridge for a ``with`` block."""

import contextlib
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from rmm_managed_bridge.errors import BridgeError, InstallError
from rmm_managed_bridge.lifecycle.install import Bridge, enter_block, install


class installed(contextlib.ContextDecorator):  # noqa: N801 - used like a function: `with bridge.installed():`
    """Install for a ``with`` block: ``with bridge.installed("host"):``.

    Takes the arguments of `install`. There is one bridge in a process: where one is installed already, by another block
    or by `install`, the block shares it and may add frameworks to it. A bridge that a block has installed ends with the
    last block that shares it, in whatever thread that is; one that `install` has installed stays. With
    ``numpy_scope="context"`` every block reaches the context that it is in, and leaves it as it was.

    It is no question: ``if installed():`` raises. ``status().installed`` answers it.

    Parameters
    ----------
    backend, **arguments
        As for `install`, looked at when the block is entered.

    Raises
    ------
    InstallError, BackendError, FrameworkError, ConfigError
        As `install` does, from the ``with``.

    Examples
    --------
    >>> bridge.uninstall()
    >>> with bridge.installed("host"):
    ...     x = np.ones(1000)
    >>> bridge.owns(x), bridge.status().installed
    (True, False)
    """

    def __init__(self, backend: str | None = None, **arguments: Any) -> None:
        self._backend = backend
        self._arguments = arguments
        self._close: Callable[[], None] | None = None

    def __enter__(self) -> Bridge:
        if self._close is not None:
            raise InstallError("this installed(...) is entered already; make one for each block")
        bridge, self._close = enter_block(self._backend, **self._arguments)
        return bridge

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close, self._close = self._close, None
        if close is None:
            raise InstallError("this installed(...) was never entered; write `with installed(...):`")
        close()

    def _recreate_cm(self) -> "installed":
        """As a decorator, give each call a block of its own: calls may overlap."""
        return installed(self._backend, **self._arguments)

    def __bool__(self) -> NoReturn:
        raise BridgeError("installed(...) is for a `with` block and has no truth; ask status().installed")


# Completion knows the arguments by this.
installed.__signature__ = inspect.signature(install).replace(return_annotation=inspect.Signature.empty)  # type: ignore[attr-defined]
