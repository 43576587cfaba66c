"""`tag` on functions of all kinds: each step is inside, and what runs between the steps is not: P2."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rmm_managed_bridge as bridge

pytestmark = pytest.mark.behaviour("P2")


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    bridge.install("host", frameworks=["numpy"])
    yield
    bridge.uninstall()


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Stands for the one of all tests, which would have each test uninstall."""


def current() -> str:
    """Return the tag that is current, as a record has it."""
    record = bridge.allocation_of(np.empty(1))
    assert record is not None
    return record.tag


def test_a_function_is_inside_and_its_caller_is_not() -> None:
    @bridge.tag("load")
    def work(deeper: int = 0) -> list[str]:
        """Its own words."""
        return [current(), *(work(deeper - 1) if deeper else [])]

    assert work() == ["load"]
    assert work(2) == ["load", "load/load", "load/load/load"]
    with bridge.tag("outer"):
        assert work() == ["outer/load"]
        assert current() == "outer"
    assert (work.__name__, work.__doc__) == ("work", "Its own words.")

    @bridge.tag("load")
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert current() == ""


def test_methods_of_all_kinds() -> None:
    class Model:
        @bridge.tag("method")
        def method(self) -> str:
            return current()

        @staticmethod
        @bridge.tag("static")
        def static() -> str:
            return current()

        @classmethod
        @bridge.tag("class")
        def of_class(cls) -> str:
            return current()

    assert (Model().method(), Model.static(), Model.of_class()) == ("method", "static", "class")


def test_a_coroutine_is_inside_from_its_first_step_to_its_last() -> None:
    others: list[str] = []

    async def other() -> None:
        for _ in range(5):
            others.append(current())
            await asyncio.sleep(0)

    @bridge.tag("work")
    async def work(name: str) -> list[str]:
        found = [current()]
        with bridge.tag(name):
            await asyncio.sleep(0)
            found.append(current())
        await asyncio.sleep(0)
        return [*found, current(), await asyncio.to_thread(current)]

    async def main() -> None:
        task = asyncio.create_task(other())
        with bridge.tag("main"):
            found = await asyncio.gather(work("a"), work("b"))
            assert current() == "main"
        assert found == [["main/work", f"main/work/{name}", "main/work", "main/work"] for name in "ab"]
        await task

    assert inspect.iscoroutinefunction(work)
    asyncio.run(main())
    assert others == [""] * 5


@bridge.tag("steps")
def steps(depth: int) -> Generator[str, Any, str]:
    """Yield the tag at each step, ever deeper, and back."""
    for _ in range(depth):
        yield current()
    with bridge.tag("deep"):
        yield current()
    return current()


@given(st.lists(st.sampled_from(["enter", "leave", "step"]), max_size=30), st.integers(0, 5))
def test_steps_of_a_generator_and_tags_around_them_do_not_meet(actions: list[str], depth: int) -> None:
    """Whatever tags its caller enters and leaves between the steps, each side sees its own."""
    running, expected = steps(depth), iter(["steps"] * depth + ["steps/deep"])
    entered: list[bridge.tag] = []
    for action in actions:
        if action == "enter":
            entered.append(bridge.tag("t").__enter__())
        elif action == "leave" and entered:
            entered.pop().__exit__(None, None, None)
        elif action == "step":
            try:
                found = next(running)
            except StopIteration:
                running = steps(depth)
                expected = iter(["steps"] * depth + ["steps/deep"])
                continue
            assert found.removeprefix("t/").replace("t/", "") == next(expected)
        assert current() == "/".join(["t"] * len(entered))
    running.close()
    for each in reversed(entered):
        each.__exit__(None, None, None)
    assert current() == ""


def test_an_asynchronous_generator() -> None:
    @bridge.tag("pages")
    async def pages() -> AsyncGenerator[str, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield current()
        finally:
            ended.append(current())

    ended: list[str] = []

    async def main() -> None:
        running = pages()
        assert [await anext(running), current(), await anext(running), current()] == ["pages", "", "pages", ""]
        await running.aclose()

    asyncio.run(main())
    assert ended == ["pages"]


def test_a_limit_holds_for_each_call() -> None:
    @bridge.tag("bounded", limit="1MiB")
    def work(size: int) -> int:
        return np.empty(size, "u1").size

    assert work(1000) == 1000
    with pytest.raises(MemoryError):
        work(2 << 20)


@pytest.mark.parametrize("wrong", [int, 3, np.ones(1000), staticmethod(current)])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    with pytest.raises(bridge.ConfigError, match="tag decorates functions, not"):
        bridge.tag("a")(wrong)
    with pytest.raises(bridge.ConfigError, match=r'write @tag\("load"\)'):

        @bridge.tag  # type: ignore[arg-type]
        def work() -> None: ...
