"""What the bridge costs on the CPU: against NumPy's own memory, and with the ledger on against off.

python tests/bench/bench_host.py
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from measure import Row, best_ns, print_rows

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import core, ledger, numpy_handler


def numpy_rows() -> list[Row]:
    works: list[tuple[str, Callable[[], object], int, float | None]] = [
        ("np.empty(8 B)", lambda: np.empty(8, "u1"), 20_000, None),
        ("np.empty(1 KiB)", lambda: np.empty(1024, "u1"), 20_000, 1.25),
        ("np.empty(64 KiB)", lambda: np.empty(1 << 16, "u1"), 20_000, None),
        ("np.zeros(1 KiB)", lambda: np.zeros(1024, "u1"), 20_000, None),
        ("np.zeros(8 MiB)", lambda: np.zeros(1 << 20), 20, None),
        ("np.ones(64 MiB)", lambda: np.ones(1 << 23), 5, 0.7),
    ]
    plain = [best_ns(work, count) for _, work, count, _ in works]
    rows = []
    with bridge.installed("host", frameworks=["numpy"]):
        for (name, work, count, goal), peer_ns in zip(works, plain, strict=True):
            rows.append(Row(name, best_ns(work, count), "NumPy's own", peer_ns, goal))
    return rows


def ledger_rows() -> list[Row]:
    times = {}
    for track in ("off", "counters", "sites"):
        heap = core.host_heap(track=track)
        handler = numpy_handler.NumpyHandler()
        handler.use(heap)
        before = numpy_handler.set_current(handler.capsule)
        times[track] = best_ns(lambda: np.empty(1024, "u1"), 20_000)
        numpy_handler.set_current(before)
        handler.use(None)
        heap.retire()
    return [
        Row(f"np.empty(1 KiB), track={track!r}", times[track], "track='off'", times["off"], None) for track in times
    ]


def lookup_rows() -> list[Row]:
    heap = core.host_heap()
    blocks = [heap.allocate(256, cpu=True) for _ in range(100_000)]
    found = best_ns(lambda: bridge.allocation_of(blocks[50_000] + 100), 5000)
    native = best_ns(lambda: core.block_of(blocks[50_000] + 100), 5000)
    ledger_bytes = ledger.counters()[5]
    for ptr in blocks:
        heap.deallocate(ptr)
    heap.retire()
    print(f"ledger: {ledger_bytes / 100_000:.0f} bytes a live allocation with 100,000 live, of which pool tables 8")
    return [
        Row("allocation_of(interior pointer), 100,000 live", found, "the limit", 2000, 1.0),
        Row("block_of, likewise", native, "allocation_of", found, None),
    ]


if __name__ == "__main__":
    core.set_internal_files([str(Path(np.__file__).parent)])
    print_rows("NumPy on the host backend, call sites on", numpy_rows())
    print_rows("What tracking costs", ledger_rows())
    print_rows("Looking up", lookup_rows())
