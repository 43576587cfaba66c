"""Functions that run inside something, from their start to their end, and what runs between their steps does not."""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

from rmm_managed_bridge.errors import ConfigError, shown

__all__ = ["FunctionT", "Inside", "decorated"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Inside(Protocol):
    """What one call that runs in steps is inside of."""

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run one step inside, and leave its caller's context as it was."""


def decorated(
    function: FunctionT, block: AbstractContextManager[Any], inside: Callable[[], Inside], name: str
) -> FunctionT:
    """Return `function` with each of its calls inside.

    Parameters
    ----------
    function
        Plain, a coroutine function, a generator or an asynchronous generator.
    block
        What a plain call is inside of.
    inside
        Makes what a call in steps is inside of, when its first step begins.
    name
        Of the decorator, for the error.

    Raises
    ------
    ConfigError
        If it is no function.
    """
    if not callable(function) or isinstance(function, type | staticmethod):
        raise ConfigError(
            f"{name} decorates functions, not {shown(function)}: put it below @staticmethod, @classmethod and "
            "@property, and on the methods of a class"
        )
    is_function = inspect.isroutine(function) or isinstance(function, functools.partial)
    body: Callable[..., Any] = function if is_function else type(function).__call__
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(body):
        return cast(FunctionT, _coroutine(function, inside))
    if inspect.isasyncgenfunction(body):
        return cast(FunctionT, _asynchronous_generator(function, inside))
    if inspect.isgeneratorfunction(body):
        return cast(FunctionT, _generator(function, inside))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with block:
            return function(*args, **kwargs)

    return cast(FunctionT, call)


# `inside` may raise, so it is asked before there is a coroutine: one that is never awaited is a warning.
def _coroutine(function: Callable[..., Any], inside: Callable[[], Inside]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        made = inside()
        return await _Awaited(made, function(*args, **kwargs))

    return call


def _generator(function: Callable[..., Any], inside: Callable[[], Inside]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        made = inside()
        return (yield from _Steps(made, function(*args, **kwargs)))

    return call


def _asynchronous_generator(function: Callable[..., Any], inside: Callable[[], Inside]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        made = inside()
        theirs = function(*args, **kwargs)
        step = theirs.asend(None)
        while True:
            try:
                item = await _Awaited(made, step)
            except StopAsyncIteration:
                return
            try:
                step = theirs.asend((yield item))
            except GeneratorExit:
                await _Awaited(made, theirs.aclose())
                raise
            except BaseException as error:
                step = theirs.athrow(error)

    return call


class _Steps(Generator[Any, Any, Any]):
    """A generator, or what an awaitable is driven by, each step of which runs inside."""

    def __init__(self, inside: Inside, theirs: Any) -> None:
        self._inside, self._theirs = inside, theirs

    def send(self, value: Any) -> Any:
        return self._inside.run(self._theirs.send, value)

    def throw(self, error: Any, *deprecated: Any) -> Any:
        return self._inside.run(self._theirs.throw, error, *deprecated)

    def close(self) -> None:
        self._inside.run(self._theirs.close)


class _Awaited:
    """An awaitable, each step of which runs inside."""

    def __init__(self, inside: Inside, theirs: Any) -> None:
        self._inside, self._theirs = inside, theirs

    def __await__(self) -> _Steps:
        return _Steps(self._inside, self._theirs.__await__())
