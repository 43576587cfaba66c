"""pool="debug": each block apart, between guards, filled when it is freed, and looked at."""

import ctypes
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.programs import must_succeed, run_python
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge.config import PoolSettings

MIB = 1 << 20


@pytest.fixture
def debug() -> Iterator[Any]:
    """The bridge on a host pool without reuse."""
    with bridge.installed("host", frameworks=["numpy"], pool="debug"):
        yield native_pool.pools()[-1]


def write(address: int, value: int) -> None:
    ctypes.c_ubyte.from_address(address).value = value


def expect(action: Callable[[], None], text: str) -> str:
    """Do something that the debug mode has to notice, and return what it says."""
    before = bridge.stats().damaged_blocks
    with pytest.warns(bridge.BridgeWarning, match=text) as said:
        action()
        assert eventually(lambda: bridge.stats() and len(said) == 1)
    assert bridge.stats().damaged_blocks == before + 1
    return str(said[0].message)


@pytest.mark.parametrize(
    ("offset", "where"),
    [(1000, "past its end"), (1063, "past its end"), (-1, "in front of"), (-512, "in front of")],
)
def test_writing_past_a_block_is_named_with_its_place(debug: Any, offset: int, where: str) -> None:
    def overrun() -> None:
        array = np.zeros(1000, "u1")
        write(array.ctypes.data + offset, 7)

    line = overrun.__code__.co_firstlineno + 1
    text = expect(overrun, f"memory is corrupt: the block of 1000 bytes .* was written {where}")
    assert f"(numpy, {__file__}:{line})" in text
    assert text.endswith(f"first at byte {offset}")
    assert [event.action for event in bridge.history() if event.action == "damage"]


def test_writing_after_the_free_is_noticed(debug: Any) -> None:
    def use_after_free() -> None:
        array = np.zeros(1000, "u1")
        address = array.ctypes.data
        del array
        assert eventually(lambda: ctypes.c_ubyte.from_address(address + 5).value == 0xDD), "it is filled"
        write(address + 5, 7)

    text = expect(use_after_free, "was written after it was freed")
    assert text.endswith("first at byte 5")


def test_within_its_bounds_nothing_is_said(debug: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (1, 7, 64, 1000, 4096, MIB, 5 * MIB):
            array = np.full(size, 7, "u1")
            array.resize(2 * size)
            array.resize(max(size // 2, 1))
            assert (array == 7).all()
            assert bridge.owns(array) and array.ctypes.data % 64 == 0
            assert (np.zeros(size, "u1") == 0).all()
        del array
        assert eventually(lambda: bridge.stats().reserved_bytes == 0), "all of it goes back"


def test_nothing_is_used_again_while_it_is_looked_at(debug: Any) -> None:
    seen = {np.empty(100, "u1").ctypes.data for _ in range(100)}
    assert len(seen) > 90


def test_new_memory_has_a_pattern(debug: Any) -> None:
    assert (np.empty(1000, "u1") == 0xCD).all()


def test_records_views_and_interior_addresses_work_as_ever(debug: Any) -> None:
    array = np.arange(1000)
    found = bridge.allocation_of(array[500:])
    assert found is not None and found.requested_bytes == 8000 and found.ptr == array.ctypes.data
    assert not bridge.owns(array.ctypes.data + 8000)
    with pytest.raises(bridge.ForeignPointerError):
        debug.deallocate(array.ctypes.data + 64)
    ptr = debug.allocate(100, cpu=True)
    debug.deallocate(ptr)
    with pytest.raises(bridge.ForeignPointerError):
        debug.deallocate(ptr)


@pytest.mark.parametrize("alignment", [1, 64, 512, 4096, 1 << 18])
def test_alignment_holds(debug: Any, alignment: int) -> None:
    ptr = debug.allocate(100, alignment=alignment)
    assert ptr % alignment == 0
    debug.deallocate(ptr)


def test_the_limit_holds(make_heap: Any) -> None:
    heap = make_heap(settings=PoolSettings(limit_bytes=MIB, pool="debug"))
    blocks = [heap.allocate(100_000) for _ in range(10)]
    with pytest.raises(MemoryError):
        heap.allocate(100_000)
    for ptr in blocks:
        heap.deallocate(ptr)
    heap.deallocate(heap.allocate(900_000))


def test_threads_have_it_too(debug: Any) -> None:
    def work(seed: int) -> bool:
        good = True
        for size in range(1, 200):
            array = np.full(size * seed, seed, "u1")
            good = good and bool((array == seed).all())
        return good

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(1, 9)))


def test_a_program_may_end_with_blocks_in_every_state() -> None:
    must_succeed(
        run_python(
            """
            import numpy as np
            import rmm_managed_bridge as bridge
            bridge.install("host", pool="debug")
            kept = [np.ones(n) for n in range(1, 1000)]
            del kept[::2]
            """
        )
    )


@pytest.mark.parametrize("what", ["overrun", "use_after_free"])
def test_address_sanitizer_sees_single_bytes(what: str) -> None:
    """The guards and freed blocks are poisoned where the sanitizer's runtime is there."""
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = Path(runtime.stdout.strip())
    if not library.is_absolute():
        pytest.skip("g++ has no AddressSanitizer here")
    # memset is one of the functions that the runtime watches: no code has to be built with the sanitizer.
    program = f"""
import ctypes, numpy as np
import rmm_managed_bridge as bridge
bridge.install("host", frameworks=["numpy"], pool="debug")
array = np.zeros(1000, "u1")
address = array.ctypes.data
ctypes.memset(address, 1, 1000)
print("so far so good", flush=True)
if {what!r} == "overrun":
    ctypes.memset(address, 1, 1001)
else:
    del array
    import time
    time.sleep(0.01)
    for _ in range(100):
        ctypes.memset(address, 1, 1)
        time.sleep(0.001)
"""
    environment = {"LD_PRELOAD": str(library), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "so far so good" in done.stdout, done.stderr
    assert done.returncode != 0
    assert re.search(
        r"AddressSanitizer: (use-after-poison|heap-use-after-free|unknown-crash|heap-buffer-overflow)", done.stderr
    ), done.stderr


CORRUPT = """
import atexit, ctypes, time
import rmm_managed_bridge as bridge
atexit.register(print, "the others have run")
import numpy as np

bridge.install("host", frameworks=["numpy"], pool="debug")
array = np.zeros(1000, "u1")
ctypes.c_ubyte.from_address(array.ctypes.data + 1000).value = 7
del array
end = time.monotonic() + 20
while not bridge.history().events and time.monotonic() < end:
    time.sleep(0.01)
for _ in range(100):  # steps of the interpreter, at one of which it warns
    time.sleep(0.001)
print("done")
"""


@pytest.mark.parametrize(("option", "code"), [("error", 1), ("default", 0)])
def test_corruption_that_nobody_could_raise_ends_the_program_in_failure(option: str, code: int) -> None:
    done = run_python(CORRUPT, options=("-W", option))
    assert "memory is corrupt: the block of 1000 bytes" in done.stderr
    assert (done.returncode, done.stdout) == (code, "done\nthe others have run\n"), done.stderr
