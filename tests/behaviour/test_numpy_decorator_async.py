"""`numpy_allocator` on coroutine functions and asynchronous generators: each step on the bridge's memory: N2."""

import asyncio
import contextvars
import inspect
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest
from helpers.programs import must_succeed, owned, run_python

import rmm_managed_bridge as bridge

pytestmark = [pytest.mark.behaviour("N2"), pytest.mark.usefixtures("numpy_as_before")]


class Pause:
    """One step of a coroutine, without a loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield


def test_a_coroutine_function_is_inside_from_its_first_step_to_its_last() -> None:
    found: list[bool] = []

    async def other() -> None:
        for _ in range(5):
            found.append(owned())
            await asyncio.sleep(0)

    @bridge.numpy_allocator("host")
    async def work(number: int) -> tuple[int, list[bool]]:
        inside = [owned()]
        for _ in range(3):
            await asyncio.sleep(0)
            inside.append(owned())
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0)
        except TimeoutError:
            inside.append(owned())
        inside.append(await asyncio.to_thread(owned))
        return number, inside

    async def main() -> None:
        task = asyncio.create_task(other())
        assert await work(7) == (7, [True] * 6)
        assert not owned()
        assert await asyncio.gather(work(1), work(2)) == [(1, [True] * 6), (2, [True] * 6)]
        await task

    assert inspect.iscoroutinefunction(work)
    asyncio.run(main())
    assert found == [False] * 5


def test_coroutines_that_one_context_steps_in_turn_do_not_meet() -> None:
    """A loop of somebody's own may run all of them in one context, where a plain ``with`` would leave in its order."""

    @bridge.numpy_allocator("host")
    async def work() -> list[bool]:
        found = []
        for _ in range(3):
            found.append(owned())
            await Pause()
        return found

    running = {"a": work(), "b": work()}
    done = {}
    while running:
        for name, each in list(running.items()):
            try:
                each.send(None)
            except StopIteration as end:
                done[name] = end.value
                del running[name]
            assert not owned()
    assert done == {"a": [True] * 3, "b": [True] * 3}


def test_a_cancelled_coroutine_and_one_that_is_thrown_away_leave() -> None:
    ended: list[bool] = []

    @bridge.numpy_allocator("host")
    async def wait() -> None:
        try:
            await Pause()
        finally:
            ended.append(owned())

    async def main() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not owned()

    asyncio.run(main())
    thrown_away = wait()
    thrown_away.send(None)
    contextvars.Context().run(thrown_away.close)
    assert ended == [True, True]


def test_a_block_whose_coroutine_is_closed_in_another_context_ends_in_silence() -> None:
    async def inside() -> None:
        with bridge.numpy_allocator("host"):
            await Pause()

    left = inside()
    contextvars.Context().run(left.send, None)
    left.close()


def test_an_asynchronous_generator_is_inside_in_every_step() -> None:
    said: list[Any] = []

    @bridge.numpy_allocator("host")
    async def steps(count: int) -> AsyncGenerator[tuple[int, bool], str]:
        try:
            for number in range(count):
                await asyncio.sleep(0)
                said.append((yield number, owned()))
        except KeyError:
            yield -1, owned()
        finally:
            await asyncio.sleep(0)
            said.append(owned())

    async def main() -> None:
        assert [item async for item in steps(3)] == [(0, True), (1, True), (2, True)]
        assert said == [None] * 3 + [True]
        generator = steps(3)
        assert await anext(generator) == (0, True)
        assert not owned()
        assert await generator.asend("hello") == (1, True)
        assert await generator.athrow(KeyError()) == (-1, True)
        await generator.aclose()
        assert said[4:] == ["hello", True]
        with pytest.raises(StopAsyncIteration):
            await anext(generator)
        assert not owned()

    assert inspect.isasyncgenfunction(steps)
    asyncio.run(main())


def test_a_failure_to_start_awaits_nothing() -> None:
    """A coroutine that was made and never awaited would be a warning."""

    @bridge.numpy_allocator("managed")
    async def work() -> None:
        raise AssertionError

    @bridge.numpy_allocator("managed")
    async def steps() -> AsyncGenerator[int, None]:
        yield 1

    @bridge.numpy_allocator("managed")
    def plain_steps() -> Generator[int, None, None]:
        yield 1

    async def take_one() -> int:
        return await anext(steps())

    for start in (lambda: asyncio.run(work()), lambda: asyncio.run(take_one()), lambda: next(plain_steps())):
        with pytest.raises(bridge.InstallError, match="no pool of managed memory"):
            start()


def test_decorating_at_import_needs_no_pool_and_an_open_generator_ends_silently() -> None:
    must_succeed(
        run_python(
            """
            import asyncio
            import numpy as np
            import rmm_managed_bridge as bridge

            @bridge.numpy_allocator()
            async def work():
                await asyncio.sleep(0)
                return np.ones(10)

            @bridge.numpy_allocator("host")
            def left_open():
                kept = np.ones(10)
                yield kept

            bridge.install("host", frameworks=["numpy"], numpy_scope="context")
            assert bridge.owns(asyncio.run(work()))
            generator = left_open()
            next(generator)
            """
        )
    )
