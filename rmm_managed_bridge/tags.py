"""Names for what is allocated inside a block of code, with limits and hints."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge._native.recorded import RECORD_IT
from rmm_managed_bridge.config import Hints
from rmm_managed_bridge.decorating import FunctionT, decorated
from rmm_managed_bridge.errors import ConfigError, shown, warn_user
from rmm_managed_bridge.hints import policy
from rmm_managed_bridge.units import format_bytes, parse_bytes

_LONGEST_TAG = 200


class tag:  # noqa: N801 - used like a function: `with bridge.tag("load"):`
    """Name what is allocated inside the block, or inside a function.

    ``with bridge.tag("load"):`` is for a block, ``@bridge.tag("load")`` for every call of a function, also of a
    coroutine function, a generator or an asynchronous generator: what runs between the steps of those is not tagged,
    as it would be by a ``with`` around a ``yield``. They are inside the tag that is current when they begin.

    Tags nest: ``"a"`` and inside it ``"b"`` give ``"a/b"``. Each thread and each asyncio task has its own, with the
    rules of `contextvars`: a task inherits the tag it was made under, a new thread starts without one (on Python 3.14
    with ``thread_inherit_context``, it inherits). Allocations made by native code without the GIL have no tag.

    Parameters
    ----------
    name : str
        Up to 200 characters. Names are kept for the life of the process, so use a fixed set of them. After 65,536
        different ones, new names without a limit count as ``"(other tags)"``, which one `BridgeWarning` says, and
        their hints are not kept.
    limit : int or str, optional
        The most that may be live of what is allocated in blocks with this tag and this limit, tags inside them
        included, in bytes or as text such as ``"2GiB"``: beyond it, an allocation is a `MemoryError`. A resize counts
        too. Not known, and so not limited, is what has no tag: allocations without the GIL, and with ``track="off"``,
        where a `BridgeWarning` says so.
    hints : Hints or str, optional
        How memory with this tag is to be placed, wherever it is handed over later; tags inside inherit it. Kept with
        the name, as it is at that place in the nesting: the last ones given count. `using_hints` takes precedence. They
        say nothing of huge pages, which are a matter of whole pools.

    Raises
    ------
    ConfigError
        If an argument cannot be used.

    Examples
    --------
    >>> with bridge.tag("load", limit="1GiB"):
    ...     x = np.ones(1 << 20)
    >>> bridge.allocation_of(x).tag
    'load'
    >>> @bridge.tag("make")
    ... def make():
    ...     return np.ones(1000)
    >>> bridge.allocation_of(make()).tag
    'make'
    """

    __slots__ = ("_hints", "_limit_bytes", "_name")

    def __init__(self, name: str, limit: int | str | None = None, *, hints: Hints | str | None = None) -> None:
        if callable(name):
            raise ConfigError('write @tag("load"), with a name')
        if not isinstance(name, str) or not name or len(name) > _LONGEST_TAG:
            order = "" if isinstance(name, str) else "; the name comes first, tag(name, limit)"
            raise ConfigError(f"a tag is text of 1 to {_LONGEST_TAG} characters, not {shown(name)}{order}")
        self._name = name
        self._limit_bytes = None if limit is None else _limit_bytes(name, limit)
        self._hints = None if hints is None else policy.placement_hints(hints)

    def __call__(self, function: FunctionT) -> FunctionT:
        """Decorate a function."""
        return decorated(function, self, lambda: _Inside(self._enter()), "tag")

    # What to go back to is kept with the tag's number, not here: tasks and threads may share one object.
    def __enter__(self) -> Self:
        native_process.tag_variable.set(self._enter())
        return self

    def _enter(self) -> int:
        """Return the number of this tag inside the current one."""
        if self._limit_bytes is not None and (why := _why_limits_are_off()) is not None:
            warn_user(f"the limit of {self!r} limits nothing: {why}")
        number = native_process.nested_tag(native_process.tag_variable.get(), self._name, self._limit_bytes)
        if self._limit_bytes is None and number >= native_process.MOST_TAGS:
            _say_that_there_are_too_many(self)
        elif self._hints is not None:
            policy.set_of_tag(native_process.tag_name(number), self._hints)
        return int(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        native_process.tag_variable.set(native_process.outer_tag(native_process.tag_variable.get()))

    def __repr__(self) -> str:
        limit = "" if self._limit_bytes is None else f", limit={format_bytes(self._limit_bytes)!r}"
        return f"tag({self._name!r}{limit})"


def _limit_bytes(name: str, limit: int | str) -> int:
    try:
        return parse_bytes(limit, "limit")
    except ConfigError as error:
        try:
            parse_bytes(name)
        except ConfigError:
            raise error from None
        raise ConfigError(f"{error}; the name comes first, tag(name, limit)") from None


class _Inside:
    """The tag of one call that runs in steps, between which its caller's context has what it had."""

    def __init__(self, number: int) -> None:
        self._number = number

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run one step. What it leaves set, by a ``with`` of its own that goes on, is there again in the next."""
        outside = native_process.tag_variable.get()
        native_process.tag_variable.set(self._number)
        try:
            return step(*args)
        finally:
            self._number = native_process.tag_variable.get()
            native_process.tag_variable.set(outside)


_said_too_many = False


def _say_that_there_are_too_many(new: tag) -> None:
    global _said_too_many
    if not _said_too_many:
        _said_too_many = True
        warn_user(
            f"{new!r} has no name of its own any more: after {native_process.MOST_TAGS:,} different tags, new ones "
            f"count as {native_process.OTHER_TAGS!r}; name kinds of work, not each request"
        )


def _why_limits_are_off() -> str | None:
    serving = [pool.track for pool in native_pool.pools() if not pool.retired]
    if serving:
        return RECORD_IT if all(track == "off" for track in serving) else None
    if native_process.is_child():
        return "this process was forked, and its arrays are plain memory; call install('host') in it"
    return None
