"""Threads that do not hold the GIL name their own lines too: C++ that is called from Python, PyTorch, RMM."""

import ctypes
import functools
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from helpers import c_caller
from helpers.programs import must_succeed, run_python

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge._native import process as native_process

pytestmark = [
    pytest.mark.behaviour("P6"),
    pytest.mark.skipif(sys.version_info >= (3, 14), reason="frames of 3.14 are not read without the GIL"),
]

Take = Callable[[], int]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with bridge.installed("host", frameworks=["numpy"]):
        yield


@pytest.fixture
def take() -> Iterator[Take]:
    """Return a function without a frame of its own that allocates 100 bytes, and lets go of the GIL for it."""
    handler = c_caller.functions_of(numpy_handler.current())
    malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(handler.malloc)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(handler.free)
    before = {record.ptr for record in bridge.snapshot()}
    yield functools.partial(malloc, handler.context, 100)
    for record in bridge.snapshot():
        if record.ptr not in before and record.requested_bytes == 100:
            free(handler.context, record.ptr, 100)


def _site(what: Any) -> bridge.CallSite:
    record = bridge.allocation_of(what)
    assert record is not None
    return record.site


# Each makes an array with the GIL and a block without it on one line, and may be put anywhere.
STATEMENTS = [
    "made = np.empty(9), take()",
    "made = (\n  1,\n  np.empty(9), take())[1:]",
    "made = [(np.empty(9), take())\n  for each in (1,)][0]",
    "made = (lambda:\n  (np.empty(9), take()))()",
    "try:\n  1 / 0\nexcept ZeroDivisionError:\n  made = np.empty(9), take()",
    "def generate():\n  yield 1\n  yield np.empty(9), take()\n_, made = generate()",
    "async def work():\n  keep((np.empty(9), take()))\n[*work().__await__()]\nmade = kept.pop()",
    "class Made:\n  array = np.empty(9), take()\nmade = Made.array",
    "class Init:\n  def __init__(self):\n    self.made = np.empty(9), take()\nmade = Init().made",
    "made = eval('np.empty(9), take()', globals())",
    "made = sorted([1], key=lambda each: keep((np.empty(9), take())))\nmade = kept.pop()",
    "np.apply_along_axis(lambda row: keep((np.empty(9), take())), 0, np.zeros(3))\nmade = kept.pop()",
]
FILES = ["plain.py", "na\u00efve.py", "\u03c0.py", "\U0001f40d.py", "raw\udcff.py", "site-packages/lib.py"]


def _check(source: str, file: str, take: Take) -> None:
    kept: list[Any] = []

    def keep(made: Any) -> int:
        kept.append(made)
        return 1

    names: dict[str, Any] = {"np": np, "take": take, "keep": keep, "kept": kept, "made": None}
    exec(compile(source, f"/made/{file}", "exec"), names)
    array, ptr = names["made"]
    held, free = _site(array), _site(ptr)
    assert (held.file, held.line, held.function) == (free.file, free.line, free.function), source
    assert (held.library, held.via) == (free.library, free.via), source


def _situation(choose: random.Random) -> tuple[str, str]:
    statement = choose.choice(STATEMENTS)
    lines = [choose.choice(["", "\n" * 3, "pass\n" * 300, "padding = 1; " * 30]), statement]
    if choose.random() < 0.5:
        body = "\n".join(lines).replace("\n", "\n  ")
        lines = [f"def function():\n  global made, generate, Made, Init, work, _\n  {body}\nfunction()"]
    return "\n".join(lines), choose.choice(FILES)


def test_the_line_is_the_one_that_is_named_with_the_gil(take: Take) -> None:
    choose = random.Random(1)
    for _ in range(400):
        _check(*_situation(choose), take)


def test_nothing_that_other_threads_do_changes_it(take: Take) -> None:
    """Collections, other threads' tracebacks and locals, and code that is made where other code was."""
    import gc

    over = threading.Event()
    errors: list[BaseException] = []

    def disturb() -> None:
        while not over.is_set():
            gc.collect(0)
            for frame in sys._current_frames().values():
                str(frame.f_lineno)
            exec(compile("def f(): return 1", f"/made/{random.random()}", "exec"), {})

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(150):
                _check(*_situation(choose), take)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    disturbing.join()
    assert errors == []


def test_what_was_known_of_dead_code_is_not_said_of_what_comes_to_its_address(take: Take) -> None:
    addresses = set()
    for number in range(2000):
        line, name = 1 + number % 7, f"name{number % 13:02}"
        file = f"/made/file{number % 11:02}.py"
        names: dict[str, Any] = {"take": take}
        exec(compile("\n" * (line - 1) + f"def {name}(): return take()\n" + "\n" * (7 - line), file, "exec"), names)
        function: FunctionType = names[name]
        addresses.add(id(function.__code__))
        assert _site(function())[:3] == (file, line, name)
        del names, function
    assert len(addresses) < 2000  # else nothing was tried


def test_whose_a_dead_library_was_is_not_said_of_what_comes_to_its_address(take: Take) -> None:
    for number in range(1000):
        file = f"/made/{'site-packages' if number % 3 else 'cite-packages'}/file.py"
        names: dict[str, Any] = {"take": take}
        exec(compile("def made(): return take()", file, "exec"), names)
        site = _site(names["made"]())
        assert (site.file == __file__) == (site.via is not None) == bool(number % 3)
        del names


def test_new_rules_hold_at_once(take: Take) -> None:
    names: dict[str, Any] = {"take": take}
    exec(compile("def made(): return take()", "/library/file.py", "exec"), names)
    assert _site(names["made"]()).file == "/library/file.py"
    native_process.set_file_rules(library=["/library/"])
    try:
        assert _site(names["made"]()).file == __file__
    finally:
        native_process.set_file_rules()
    assert _site(names["made"]()).file == "/library/file.py"


LOOP = """
#include <stddef.h>
typedef void* (*allocator)(void*, size_t);
typedef void (*releaser)(void*, void*, size_t);
void loop(allocator allocate, releaser release, void* context, volatile int* started) {
  for (;;) {
    void* block = allocate(context, 100);
    release(context, block, 100);
    *started = 1;
  }
}
"""


@pytest.mark.skipif(c_caller.why_not() is not None, reason=c_caller.why_not() or "")
def test_threads_that_read_their_frames_as_the_interpreter_ends_end_quietly(tmp_path: Path) -> None:
    """It frees their states and frames while they run. With its debug allocator what is freed is no address."""
    (tmp_path / "loop.c").write_text(LOOP)
    library = tmp_path / "loop.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "loop.c")], check=True)
    code = """
        import ctypes, sys, threading, time
        import rmm_managed_bridge as bridge
        from helpers import c_caller
        from rmm_managed_bridge._native import numpy_handler

        # What comes after the pool's end is the C library's: NumPy's is Python's, whose allocator is exchanged there.
        bridge.install("host", numpy_scope="context")
        handler = c_caller.functions_of(numpy_handler.current())
        loop = ctypes.CDLL(sys.argv[1]).loop
        loop.argtypes = [ctypes.c_void_p] * 4
        started = [ctypes.c_int() for _ in range(2)]

        def deep(depth, flag):
            if depth:
                return deep(depth - 1, flag)
            loop(handler.malloc, handler.free, handler.context, ctypes.addressof(flag))

        class Slow:  # lives in the module: the end takes a while after the other threads' states are gone
            def __del__(self):
                time.sleep(0.05)

        slow = Slow()
        for flag in started:
            threading.Thread(target=deep, args=(20, flag), daemon=True).start()
        while not all(flag.value for flag in started):
            time.sleep(0.001)
    """
    for _ in range(3):
        must_succeed(run_python(code, library, environment={"PYTHONMALLOC": "malloc_debug"}))


def test_a_forked_child_reads_its_frames(take: Take) -> None:
    del take
    code = """
        import ctypes, functools, os, sys, threading
        import rmm_managed_bridge as bridge
        from helpers import c_caller
        from rmm_managed_bridge._native import numpy_handler

        def take():
            bridge.install("host")
            handler = c_caller.functions_of(numpy_handler.current())
            malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(handler.malloc)
            made = functools.partial(malloc, handler.context, 100)()
            assert bridge.allocation_of(made).site.function == "take", bridge.allocation_of(made)

        take()
        child = os.fork()
        if child == 0:
            take()
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
    """
    must_succeed(run_python(code, options=("-W", "ignore")))
