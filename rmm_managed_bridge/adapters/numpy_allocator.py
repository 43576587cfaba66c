"""`numpy_allocator`: NumPy on the bridge's memory for a ``with`` block, or for the calls of one function."""

import contextvars
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge.arrays.layout import HOST_ACCESSIBLE
from rmm_managed_bridge.decorating import FunctionT, decorated
from rmm_managed_bridge.errors import ConfigError, InstallError, shown


class numpy_allocator:  # noqa: N801 - used like a function: `with bridge.numpy_allocator():`
    """Let NumPy allocate from the bridge inside the block, or inside a function, in this context only.

    ``with bridge.numpy_allocator("host"):`` is for a block, ``@bridge.numpy_allocator("host")`` for every call of a
    function, also of a coroutine function, a generator or an asynchronous generator: each of those runs on this memory
    from its start to its end, and what runs between its steps does not.

    Parameters
    ----------
    kind : {"managed", "system", "host", "pinned"}, optional
        Which memory: that of the pool that serves now by default. ``"host"`` always works and needs no GPU; the others
        come from a pool that is there: of `install`, or of a `ManagedBridgeResource` that the program keeps.

    Raises
    ------
    InstallError
        On entry, or when a decorated function starts, if no pool of that kind serves.
    ConfigError
        If `kind` is none of these, or what is decorated is no function.

    Examples
    --------
    >>> with bridge.numpy_allocator("host"):  # on every backend
    ...     x = np.ones(1000)
    >>> bridge.memory_kind(x)
    'host'
    """

    def __init__(self, kind: str | None = None) -> None:
        if callable(kind):
            raise ConfigError("write @numpy_allocator(), with the parentheses")
        if kind is not None and (not isinstance(kind, str) or kind not in HOST_ACCESSIBLE):
            raise ConfigError(f"kind={shown(kind)} is not one of {', '.join(map(repr, HOST_ACCESSIBLE))}")
        self._kind = kind

    # What to go back to is kept with the context, not here: tasks and threads may share one object.
    def __enter__(self) -> Self:
        handler = _handler_for(_pool_for(self._kind))
        before = numpy_handler.set_current(handler.capsule)
        _outer_handlers.set((before, *_outer_handlers.get()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outer = _outer_handlers.get()
        if not outer:
            return  # a coroutine that is closed in another context than it ran in: this one was never entered
        _outer_handlers.set(outer[1:])
        numpy_handler.set_current(outer[0])

    def __repr__(self) -> str:
        return f"numpy_allocator({'' if self._kind is None else repr(self._kind)})"

    def __call__(self, function: FunctionT) -> FunctionT:
        """Decorate a function."""
        return decorated(function, self, lambda: _Inside(self._kind), "numpy_allocator")


class _Inside:
    """The handler of one call that runs in steps, between which its caller's context has what it had."""

    def __init__(self, kind: str | None) -> None:
        self._handler: Any = _handler_for(_pool_for(kind)).capsule
        self._outer: tuple[Any, ...] = ()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run one step. What it leaves set, by a ``with`` of its own that goes on, is there again in the next."""
        outer = _outer_handlers.set(self._outer)
        outside = numpy_handler.set_current(self._handler)
        try:
            return step(*args)
        finally:
            self._handler = numpy_handler.set_current(outside)
            self._outer = _outer_handlers.get()
            _outer_handlers.reset(outer)


_outer_handlers: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "rmm_managed_bridge.outer_numpy_handlers", default=()
)
_handlers: dict[int, numpy_handler.NumpyHandler] = {}
"""By number of the pool. A handler lives as long as the process: there is one for each pool, not for each use."""
_own_pool: native_pool.Pool | None = None
"""Host memory for where no pool of it serves. Nobody installed it, so it never stands for the pool that serves."""


def _handler_for(pool: native_pool.Pool) -> numpy_handler.NumpyHandler:
    handler = _handlers.get(pool.number)
    if handler is None:
        handler = _handlers[pool.number] = numpy_handler.NumpyHandler()
        handler.use(pool)
    return handler


def _pool_for(kind: str | None) -> native_pool.Pool:
    global _own_pool
    for pool in reversed(native_pool.pools()):
        if pool is not _own_pool and not pool.retired and pool.kind in HOST_ACCESSIBLE and kind in (None, pool.kind):
            return pool
    if kind == "host":
        if _own_pool is None:
            _own_pool = native_pool.host_pool()
        return _own_pool
    cure = "call install() first, or make a ManagedBridgeResource and keep it"
    if kind == "system":
        cure = (
            "call install(backend='system') first, or make ManagedBridgeResource(rmm.mr.SystemMemoryResource()) and "
            "keep it; either needs a device that reports access to pageable memory (HMM or ATS)"
        )
    raise InstallError(f"no pool of {kind or 'any'} memory serves now; {cure}")
