"""NumPy: a native data-memory handler (NEP 49), for the whole process or set in the current context."""

import contextvars
from collections.abc import Callable
from typing import Any

import numpy as np

from rmm_managed_bridge._native import blocks, numpy_handler
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge.adapters.numpy_errors import MemoryNotes
from rmm_managed_bridge.arrays.layout import HOST_ACCESSIBLE
from rmm_managed_bridge.errors import FrameworkError, warn_user
from rmm_managed_bridge.frameworks.numpy_handlers import foreign_handler

OLDEST = (2, 1)


_PROBE = compile('np.empty(size_bytes, "u1")', "<rmm_managed_bridge: does NumPy use it?>", "eval")


class NumpyAdapter:
    """Hooks NumPy in one of two scopes.

    ``"context"`` is the context (PEP 567) that `hook` is called in, as NumPy's own rule has it: asyncio tasks and
    `asyncio.to_thread` inherit it; other threads and executors do not, and allocate as before. ``"process"`` is every
    context in which nobody set a handler: there NumPy uses its own, which is taken over.
    """

    name = "numpy"

    def __init__(self, pool: native_pool.Pool, least_bytes: int = 0, scope: str = "context") -> None:
        version = tuple(int(part) for part in np.__version__.split(".")[:2])
        if version < OLDEST:
            raise FrameworkError(f"NumPy {np.__version__} is too old; install numpy>=2.1")
        if pool.kind not in HOST_ACCESSIBLE:
            raise FrameworkError(
                f"NumPy cannot work in {pool.kind} memory, which the CPU does not reach; use managed memory"
            )
        self._pool = pool
        self._least_bytes = least_bytes
        self._scope = scope
        self._handler = numpy_handler.default_handler() if scope == "process" else numpy_handler.NumpyHandler()
        self._before: Any = None
        self._hooked_here = False
        self._notes = MemoryNotes()

    def hook(self) -> None:
        """Set the handler and check that it works; on failure NumPy is as before."""
        if self._scope == "context":
            self._before = numpy_handler.set_current(self._handler.capsule)
            self._hooked_here = True
        self._handler.use(self._pool, self._least_bytes)
        try:
            if self._scope == "context":
                self._check()
            else:
                contextvars.Context().run(self._check)  # this context may have a handler of its own, and keeps it
        except BaseException:
            self._handler.use(None)
            self._put_back()
            raise
        self._notes.put_on()
        if (other := foreign_handler()) is not None:
            warn_user(
                f"NumPy's arrays of this context come from {other!r}, a handler that somebody else set before, and not "
                'from the pool; install(numpy_scope="context") takes its place here, or install before it is set'
            )

    def _check(self) -> None:
        # From code with a name of its own, which reports show in place of the line that installs.
        probe = eval(_PROBE, {"np": np, "size_bytes": max(self._least_bytes, 1)})
        name = np._core.multiarray.get_handler_name(probe)  # type: ignore[attr-defined]
        if name != numpy_handler.NAME or blocks.block_of(probe.ctypes.data) is None:
            raise FrameworkError(
                f"NumPy {np.__version__} does not use the bridge's handler (a new array is handled by {name!r}); "
                "please report this with your NumPy and Python versions"
            )

    def unhook(self) -> str | None:
        """Undo `hook`. Returns why it could not, if another handler was set since; ours is then inactive.

        Arrays that are alive go on: their memory is known by its address. In process scope this may be called from
        any thread and context.
        """
        self._handler.use(None)
        self._notes.take_off()
        if isinstance(self._handler, numpy_handler.DefaultHandler):
            if self._handler.taken_over:
                return None
            return "NumPy's own handler was replaced by somebody else since, and was left as it is"
        return self._put_back()

    def _put_back(self) -> str | None:
        """Leave the context that `hook` was called in, unless that was done."""
        if not self._hooked_here:
            return None
        self._hooked_here = False
        return self._leave(self._before)

    def _leave(self, before: Any) -> str | None:
        if numpy_handler.current() is not self._handler.capsule:
            return (
                "the NumPy handler of this context is not the bridge's (another was set since, or this is another "
                "context) and was left as it is"
            )
        numpy_handler.set_current(before)
        return None

    def enter_block(self, *, hooked_it: bool) -> Callable[[], str | None]:
        """Reach the context of a ``with`` block too, in ``"context"`` scope. Return what leaves it, or why not.

        `hooked_it`: the block has just called `hook`.
        """
        if self._scope == "process":
            return lambda: None
        if hooked_it:
            return self._put_back
        before = numpy_handler.set_current(self._handler.capsule)
        return lambda: self._leave(before)

    def move(self, pool: native_pool.Pool) -> None:
        """From now on allocate from another pool."""
        self._pool = pool
        self._handler.use(pool, self._least_bytes)
