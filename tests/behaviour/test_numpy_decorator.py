"""`numpy_allocator` as a decorator: each call, and each step of what runs in steps, on the bridge's memory: N2."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers.programs import must_succeed, owned, run_python

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge._native import pool as native_pool

pytestmark = [pytest.mark.behaviour("N2"), pytest.mark.usefixtures("numpy_as_before")]


def test_every_call_is_inside_and_what_comes_between_is_not() -> None:
    @bridge.numpy_allocator("host")
    def make(number: int, *, twice: bool = False) -> tuple[int, bool, bool]:
        """Say what it was called with."""
        return number, twice, owned()

    assert (make.__name__, make.__doc__) == ("make", "Say what it was called with.")
    for number in range(3):
        assert make(number, twice=True) == (number, True, True)
        assert not owned()


def test_an_exception_leaves_too() -> None:
    @bridge.numpy_allocator("host")
    def fail() -> None:
        assert owned()
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert not owned()


def test_recursion_enters_and_leaves_once_for_each_call() -> None:
    @bridge.numpy_allocator("host")
    def count(depth: int) -> int:
        assert owned()
        inner = count(depth - 1) if depth else 0
        assert owned(), "the inner call has left, and this one goes on"
        return inner + 1

    assert count(20) == 21


def test_threads_that_share_one_function_each_enter_for_themselves() -> None:
    both = threading.Barrier(2, timeout=20)
    left = threading.Event()

    @bridge.numpy_allocator("host")
    def make(*, stay: bool) -> bool:
        both.wait()
        if stay:
            assert left.wait(20)
        return owned()

    def run(*, stay: bool) -> tuple[bool, bool, bool]:
        before, inside = owned(), make(stay=stay)
        if not stay:
            left.set()
        return before, inside, owned()

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(run, stay=stay) for stay in (True, False)]
        assert [each.result() for each in found] == [(False, True, False)] * 2


@pytest.mark.parametrize("kind", ["host", "managed"])
def test_the_pool_is_looked_for_at_each_call(make_heap: Any, kind: str) -> None:
    @bridge.numpy_allocator(kind)
    def make() -> Any:
        return np.ones(10)

    for _ in range(2):
        heap = make_heap(kind=kind)
        array = make()
        assert native_pool.pool_containing(array.ctypes.data) is heap
        del array
        assert heap.retire()
    if kind == "managed":
        with pytest.raises(bridge.InstallError, match="no pool of managed memory"):
            make()


def test_what_nobody_installed_does_not_stand_for_the_pool_that_serves() -> None:
    must_succeed(
        run_python(
            """
            import numpy as np
            import rmm_managed_bridge as bridge
            from rmm_managed_bridge._native import pool as native_pool

            for _ in range(2):
                with bridge.numpy_allocator("host"):  # makes a pool of its own, once
                    assert bridge.owns(np.ones(10))
                assert len(native_pool.pools()) == 1
            try:
                bridge.numpy_allocator().__enter__()
            except bridge.InstallError as error:
                assert "no pool of any memory serves now" in str(error), error
            else:
                raise AssertionError("entered")
            managed = native_pool.host_pool(kind="managed")
            with bridge.numpy_allocator("host"), bridge.numpy_allocator():
                array = np.ones(10)
            assert native_pool.pool_containing(array.ctypes.data) is managed
            bridge.install("host", frameworks=["numpy"], numpy_scope="context")
            with bridge.numpy_allocator("host"):
                array = np.ones(10)
            assert native_pool.pool_containing(array.ctypes.data) is native_pool.pools()[-1]
            """
        )
    )


def test_a_generator_is_inside_in_every_step_and_its_caller_is_not() -> None:
    said: list[Any] = []

    @bridge.numpy_allocator("host")
    def steps(start: int) -> Generator[tuple[int, bool], str, str]:
        try:
            said.append((yield start, owned()))
            said.append((yield start + 1, owned()))
        except KeyError:
            said.append(owned())
            yield -1, owned()
        finally:
            said.append(owned())
        return "end"

    assert inspect.isgeneratorfunction(steps)
    generator = steps(5)
    assert next(generator) == (5, True)
    assert not owned()
    assert generator.send("hello") == (6, True)
    assert not owned()
    assert generator.throw(KeyError()) == (-1, True)
    assert not owned()
    with pytest.raises(StopIteration) as end:
        next(generator)
    assert (end.value.value, said) == ("end", ["hello", True, True])
    closed = steps(0)
    next(closed)
    closed.close()
    assert said[-1] is True
    assert [item for item, _ in steps(3)] == [3, 4]


def test_a_block_inside_a_generator_goes_on_in_the_next_step(make_heap: Any) -> None:
    heap = make_heap(kind="managed")

    @bridge.numpy_allocator("host")
    def steps() -> Generator[Any, None, None]:
        with bridge.numpy_allocator("managed"):
            yield np.ones(10)
            yield np.ones(10)
        yield np.ones(10)

    found = []
    with bridge.numpy_allocator("host"):
        outside = numpy_handler.current()
        for array in steps():
            found.append(native_pool.pool_containing(array.ctypes.data) is heap)
            assert numpy_handler.current() is outside
    assert found == [True, True, False]
    del array


class Callables:
    """Objects and methods that are called."""

    async def __call__(self) -> bool:
        await asyncio.sleep(0)
        return owned()

    @bridge.numpy_allocator("host")
    def method(self) -> tuple[Any, bool]:
        return self, owned()

    @classmethod
    @bridge.numpy_allocator("host")
    def of_class(cls) -> tuple[Any, bool]:
        return cls, owned()

    @staticmethod
    @bridge.numpy_allocator("host")
    async def static(number: int) -> tuple[int, bool]:
        await asyncio.sleep(0)
        return number, owned()


def test_methods_partial_functions_and_objects_with_a_call_are_functions_too() -> None:
    made = Callables()
    assert made.method() == (made, True)
    assert Callables.of_class() == (Callables, True)
    assert asyncio.run(made.static(3)) == (3, True)
    assert asyncio.run(bridge.numpy_allocator("host")(made)())
    part = bridge.numpy_allocator("host")(functools.partial(Callables.static, 4))
    assert asyncio.run(part()) == (4, True)


@pytest.mark.parametrize("wrong", [Callables, 7, staticmethod(owned), classmethod(lambda cls: 0), property(owned)])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    with pytest.raises(bridge.ConfigError, match="decorates functions, not"):
        bridge.numpy_allocator("host")(wrong)


def test_the_decorator_without_parentheses_says_what_is_missing() -> None:
    with pytest.raises(bridge.ConfigError, match="with the parentheses"):
        bridge.numpy_allocator(owned)  # type: ignore[arg-type]
