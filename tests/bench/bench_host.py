"""What the bridge costs on the CPU: against RMM's pool, against NumPy's own memory, and with the ledger on against off.

The rows of docs/performance.md that need no driver; native pairs are in bench_native.py.

python tests/bench/bench_host.py
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rmm

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from helpers.programs import HostMemory
from measure import Row, best_ns, print_rows

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import blocks, ledger, numpy_handler
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process

ROUNDS = 4
LIVE, FREE = 100_000, 50_000


def resource_rows() -> list[Row]:
    """Pairs of 1 KiB from Python through RMM's interface, over memory of the C library."""
    times: dict[str, float] = {}

    def take(name: str, pair: Callable[[], object], count: int = 2000) -> None:
        time_ns = best_ns(pair, count, 5)
        times[name] = min(time_ns, times.get(name, time_ns))

    for _ in range(ROUNDS):
        theirs = rmm.mr.PoolMemoryResource(HostMemory().resource, initial_pool_size=1 << 28)
        take("theirs", _pair(theirs))
        kept = _fragment(theirs, 5_000, 5_000)
        take("theirs, fragmented", _pair(theirs), 200)
        _free(theirs, kept)
        tracked = rmm.mr.TrackingResourceAdaptor(theirs)
        take("theirs, tracked", _pair(tracked))
        ours = bridge.ManagedBridgeResource(HostMemory().resource)
        take("ours", _pair(ours))
        kept = _fragment(ours, LIVE, FREE)
        take("ours, fragmented", _pair(ours))
        _free(ours, kept)
    what = f"the same, {LIVE:,} live, {FREE:,} free between"
    return [
        Row("allocate + free 1 KiB from Python", times["ours"], "RMM's pool", times["theirs"], 0.10),
        Row("the same", times["ours"], "RMM's pool, tracked", times["theirs, tracked"], None),
        Row(what, times["ours, fragmented"], "our empty pool", times["ours"], 1.5),
        Row(what, times["ours, fragmented"], "RMM's pool, 5,000 and 5,000", times["theirs, fragmented"], None),
    ]


def _pair(resource: Any) -> Callable[[], object]:
    allocate, deallocate = resource.allocate, resource.deallocate

    def pair() -> None:
        deallocate(allocate(1024), 1024)

    return pair


def _fragment(resource: Any, live: int, free: int) -> list[int]:
    """Return live blocks, with free ones between."""
    blocks = [resource.allocate(1024) for _ in range(live + free)]
    step = (live + free) // free
    for ptr in blocks[::step]:
        resource.deallocate(ptr, 1024)
    return [ptr for number, ptr in enumerate(blocks) if number % step]


def _free(resource: Any, blocks: list[int]) -> None:
    for ptr in blocks:
        resource.deallocate(ptr, 1024)


def small_rows() -> list[Row]:
    """Scalars and small arrays with a cut-off, and nothing recorded."""
    x, two = np.ones(10), np.float64(2)
    works: list[tuple[str, Callable[[], object]]] = [
        ("np.sqrt(np.float64(2))", lambda: np.sqrt(two)),
        ("x * 2 + 1, 10 elements", lambda: x * 2 + 1),
        ("np.empty(1)", lambda: np.empty(1)),
    ]
    theirs, ours = [], []
    for _ in range(ROUNDS):
        theirs.append([best_ns(work, 20_000, 5) for _, work in works])
        with bridge.installed("host", frameworks=["numpy"], numpy_min_bytes="1KiB", track="off"):
            ours.append([best_ns(work, 20_000, 5) for _, work in works])
    best = zip(works, map(min, zip(*ours, strict=True)), map(min, zip(*theirs, strict=True)), strict=True)
    return [Row(name, mine, "NumPy's own", plain, 1.5) for (name, _), mine, plain in best]


def numpy_rows() -> list[Row]:
    works: list[tuple[str, Callable[[], object], int, float | None]] = [
        ("np.empty(8 B)", lambda: np.empty(8, "u1"), 20_000, None),
        ("np.empty(1 KiB)", lambda: np.empty(1024, "u1"), 20_000, 1.25),
        ("np.empty(64 KiB)", lambda: np.empty(1 << 16, "u1"), 20_000, None),
        ("np.zeros(1 KiB)", lambda: np.zeros(1024, "u1"), 20_000, None),
        ("np.zeros(8 MiB)", lambda: np.zeros(1 << 20), 20, None),
        ("np.ones(64 MiB)", lambda: np.ones(1 << 23), 5, 0.7),
    ]
    theirs, ours = [], []
    for _ in range(ROUNDS):  # in turn, and the best of each: the machine is slower by half for seconds at a time
        theirs.append([best_ns(work, count, 5) for _, work, count, _ in works])
        with bridge.installed("host", frameworks=["numpy"]):
            ours.append([best_ns(work, count, 5) for _, work, count, _ in works])
    best = zip(works, map(min, zip(*ours, strict=True)), map(min, zip(*theirs, strict=True)), strict=True)
    return [Row(name, mine, "NumPy's own", plain, goal) for (name, _, _, goal), mine, plain in best]


def first_touch_rows() -> list[Row]:
    """Fill 1 GiB of memory that nobody has touched yet."""
    count = 1 << 30
    times: dict[str, float] = {}
    modes = ["NumPy's own", "never", "always"]
    # Each takes each place: what was measured before has left the kernel small pages or huge ones to give.
    for mode in [mode for turn in range(2 * len(modes)) for mode in modes[turn % 3 :] + modes[: turn % 3]]:
        if mode == "NumPy's own":
            time_ns = _fill_ns(count)
        else:
            with bridge.installed("host", frameworks=["numpy"], hugepages=mode):
                time_ns = _fill_ns(count)
        times[mode] = min(time_ns, times.get(mode, time_ns))
    plain = times.pop("NumPy's own")
    return [
        Row(f"fill 1 GiB, hugepages={mode!r}", time_ns, "NumPy's own", plain, None) for mode, time_ns in times.items()
    ]


def _fill_ns(count: int) -> float:
    start = time.perf_counter_ns()
    np.empty(count, "u1").fill(1)
    return float(time.perf_counter_ns() - start)


def ledger_rows() -> list[Row]:
    times: dict[str, float] = {}
    for track in ("off", "counters", "sites") * ROUNDS:
        heap = native_pool.host_pool(track=track)
        handler = numpy_handler.NumpyHandler()
        handler.use(heap)
        before = numpy_handler.set_current(handler.capsule)
        time_ns = best_ns(lambda: np.empty(1024, "u1"), 20_000, 5)
        times[track] = min(time_ns, times.get(track, time_ns))
        numpy_handler.set_current(before)
        handler.use(None)
        heap.retire()
    return [
        Row(f"np.empty(1 KiB), track={track!r}", times[track], "track='off'", times["off"], None) for track in times
    ]


def lookup_rows() -> list[Row]:
    heap = native_pool.host_pool()
    live = [heap.allocate(256, cpu=True) for _ in range(LIVE)]
    found = best_ns(lambda: bridge.allocation_of(live[50_000] + 100), 5000)
    native = best_ns(lambda: blocks.block_of(live[50_000] + 100), 5000)
    each = ledger.counters()[5] / LIVE  # its tables never shrink: right while there were no more before
    for ptr in live:
        heap.deallocate(ptr)
    heap.retire()
    print(f"ledger: {each:.0f} bytes a live allocation of {LIVE:,}, and 16 in the pool's tables; at most 128 wanted")
    return [
        Row("allocation_of(interior pointer), 100,000 live", found, "the limit", 2000, 1.0),
        Row("block_of, likewise", native, "allocation_of", found, None),
    ]


if __name__ == "__main__":
    native_process.set_internal_files([str(Path(np.__file__).parent)])
    print_rows("Looking up", lookup_rows())
    print_rows("Through RMM's interface, no driver, call sites on", resource_rows())
    print_rows("NumPy on the host backend, call sites on", numpy_rows())
    print_rows("NumPy on the host backend, numpy_min_bytes='1KiB', track='off'", small_rows())
    print_rows("First touch", first_touch_rows())
    print_rows("What tracking costs", ledger_rows())
