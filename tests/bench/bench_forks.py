"""What a fork costs with 512 MiB of arrays in managed memory, over a plain one.

python tests/bench/bench_forks.py

Rows: arrays on the CPU, on the device, and a second fork with nothing changed. Takes 768 MiB of the card at most.
"""

import os
import time
from collections.abc import Callable

import numpy as np

SIZE_BYTES = 512 << 20
TURNS = 5


def fork_seconds() -> float:
    """Return the time of `os.fork` in the parent; the child ends at once."""
    begun = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(0)
    seconds = time.perf_counter() - begun
    os.waitpid(child, 0)
    return seconds


def row(name: str, before: Callable[[], object]) -> None:
    taken = []
    for _ in range(TURNS):
        before()
        taken.append(fork_seconds())
    print(f"| {name} | {min(taken) * 1e3:.1f} ms | {sorted(taken)[TURNS // 2] * 1e3:.1f} ms |")


def main() -> None:
    import cupy

    import rmm_managed_bridge as bridge
    from rmm_managed_bridge._native import process
    from rmm_managed_bridge.lifecycle import forks
    from rmm_managed_bridge.units import format_bytes

    installed = bridge.install("managed", initial_pool_size="640MiB", maximum_pool_size="768MiB", fork_limit="1GiB")
    print(f"{installed!r}; {process.processors()} processors")
    print("| 512 MiB of arrays | least | median |\n| --- | --- | --- |")
    row("none yet", lambda: None)
    array = np.ones(SIZE_BYTES // 8)

    def forget() -> None:
        """Let the copies go."""
        forks.KEEP_MS = 1
        fork_seconds()
        time.sleep(0.5)

    def on_cpu() -> None:
        forget()
        array[:] = 1

    def on_device() -> None:
        forget()
        view = bridge.as_cupy(array)
        view += 1
        bridge.prefetch(array, 0)
        cupy.cuda.Device().synchronize()
        del view

    def kept() -> None:
        forks.KEEP_MS = 60_000

    row("on the CPU", on_cpu)
    kept()
    fork_seconds()
    row("on the CPU, unchanged", kept)
    row("on the device", on_device)
    kept()
    fork_seconds()
    row("on the device, unchanged", kept)
    stats = bridge.stats()
    copied, given = format_bytes(stats.fork_copied_bytes), format_bytes(stats.fork_bytes)
    print(f"{stats.fork_count} forks copied {copied} of {given} in {stats.fork_seconds:.2f} s")


if __name__ == "__main__":
    main()
