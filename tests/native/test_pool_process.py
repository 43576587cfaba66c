"""Invariant 8: in a forked child, and once shutdown has begun, no driver call is made and nothing is freed."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import FakeCuda
from fake_cuda.pool import MIB, Bench
from helpers.forked import USES, attempt, in_forked_child

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import hint_table
from rmm_managed_bridge.errors import BackendError

pytestmark = pytest.mark.fake_driver


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("installs", [False, True], ids=["", "installs"])
@pytest.mark.parametrize("use", USES)
def test_a_forked_child_makes_no_driver_call(bench: Bench, use: str, installs: bool) -> None:
    stream = bench.owned()
    ptr = bench.allocate(MIB, stream)
    bench.order(ptr, bench.owned())
    bench.used_and_freed(MIB, stream)
    bench.used_and_freed(MIB, bench.borrowed())
    hint_table.note(ptr, ptr, ptr + 4096, hint_table.READ_MOSTLY)
    array = bench.allocate(MIB, cpu=True)
    bench.expose(array, stream)
    bench.free(array)
    before = bench.heap.numbers, bench.heap.live_count
    bench.fake.clear()

    def action() -> None:
        assert bench.native_process.phase() == "forked"
        if installs:
            with pytest.raises(BackendError, match="forked"):
                bridge.install("managed")
            installed = bridge.install(frameworks=["numpy"])
            assert installed.backend == "host" and "forked" in installed.reason
            assert bridge.owns(np.ones(1000))
        attempt(use, bench, stream, ptr)
        assert bench.fake.trace() == []
        assert (bench.heap.numbers, bench.heap.live_count) == before, "nothing is freed into the parent's pool"

    assert in_forked_child(action) == ""
    assert bench.native_process.phase() == "running"
    bench.free(ptr, stream)


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has the fake driver."""
    code = textwrap.dedent(program)
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.behaviour("L1")
def test_no_driver_call_once_shutdown_has_begun(fake: FakeCuda) -> None:
    """L1, the fake's part: live blocks, quarantined ones, held streams, and finalisers that run after every handler."""
    del fake
    ended = run(f"""
        import atexit, os, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import fake_cuda
        fake_cuda.FakeCuda(fake_cuda.build()).tell_at_exit()  # before the core is loaded, and so after its end

        def use_once_more():  # registered before the core's own handler, so it runs after that
            assert native_process.phase() == "exiting"
            bench.heap.deallocate(keep[1], stream=stream.handle)
            bench.heap.trim()
            bench.heap.drop_unused_streams()
            os.write(1, b"handler\\n")

        atexit.register(use_once_more)
        from rmm_managed_bridge._native import process as native_process
        fake = fake_cuda.load()
        from fake_cuda.pool import Bench, MIB
        fake.set_current(0)
        bench = Bench(fake)
        stream = bench.owned()
        keep = [bench.allocate(MIB, stream) for _ in range(4)]
        from rmm_managed_bridge._native import hint_table
        hint_table.note(keep[1], keep[1], keep[1] + 4096, hint_table.READ_MOSTLY)
        bench.order(keep[0], bench.owned())
        fake.enqueue(stream)
        bench.free(keep[0])

        class Late:
            def __init__(self, name, ptr):
                # Module globals are gone by then.
                self.name, self.ptr, self.heap, self.handle, self.write = name, ptr, bench.heap, stream.handle, os.write

            def __del__(self):
                self.heap.deallocate(self.ptr, stream=self.handle)
                self.heap.trim()
                self.heap.retire()
                self.write(1, self.name)

        late = Late(b"global\\n", keep[2])
        cycle = [Late(b"cycle\\n", keep[3])]
        cycle.append(cycle)
        sys.modules["kept to the end"] = cycle
        atexit.register(fake.clear)  # runs before the interpreter marks the process
    """)
    assert (ended.returncode, ended.stderr) == (0, "")
    first, *finalisers, last = ended.stdout.splitlines()
    assert (first, sorted(finalisers)) == ("handler", ["cycle", "global"]), "all of them ran, and after every handler"
    assert last == "0 driver calls since the last clear: "
