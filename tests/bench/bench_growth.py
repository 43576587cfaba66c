"""An array on the device that grows by `cupy.concatenate`, over six pools: time, and what the card loses.

python tests/bench/bench_growth.py

Each way in a process of its own: RMM's resource and CuPy's allocator stay as they were first set. Takes 3 GiB of the
card, but over CuPy's pool, which keeps each size.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

WAYS = ("bridge", "bridge, populate=False", "bridge over RMM's pool", "RMM", "RMM, prefetching", "CuPy")
STEP_BYTES, STEPS = 4 << 20, 120
FIRST_BYTES, MOST_BYTES = 256 << 20, 3 << 30


def set_up(way: str) -> None:
    import cupy
    import rmm
    from rmm.allocators.cupy import rmm_cupy_allocator

    if way == "CuPy":
        cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)
    elif way.startswith("RMM"):
        pool = rmm.mr.PoolMemoryResource(rmm.mr.ManagedMemoryResource(), FIRST_BYTES, MOST_BYTES)
        rmm.mr.set_current_device_resource(rmm.mr.PrefetchResourceAdaptor(pool) if "prefetching" in way else pool)
        cupy.cuda.set_allocator(rmm_cupy_allocator)
    else:
        import rmm_managed_bridge as bridge

        if "RMM" in way:
            rmm.reinitialize(
                pool_allocator=True, managed_memory=True, initial_pool_size=FIRST_BYTES, maximum_pool_size=MOST_BYTES
            )
            bridge.install("managed", maximum_pool_size=MOST_BYTES)
        else:
            bridge.install(
                "managed",
                initial_pool_size=FIRST_BYTES,
                maximum_pool_size=MOST_BYTES,
                populate="False" not in way,
            )


def seconds(work: Callable[[], object]) -> float:
    import cupy

    cupy.cuda.Device().synchronize()
    begun = time.perf_counter()
    work()
    cupy.cuda.Device().synchronize()
    return time.perf_counter() - begun


def grow() -> None:
    import cupy

    array, piece = cupy.zeros(STEP_BYTES, "u1"), cupy.ones(STEP_BYTES, "u1")
    for _ in range(STEPS):
        array = cupy.concatenate([array, piece])


def measure(way: str) -> None:
    import cupy

    set_up(way)
    cupy.zeros(10).sum()
    free_bytes = cupy.cuda.runtime.memGetInfo()[0]
    first, second = seconds(grow), seconds(grow)
    taken = (free_bytes - cupy.cuda.runtime.memGetInfo()[0]) >> 20
    print(f"| {way} | {first:.2f} s | {second:.2f} s | {taken} MiB |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS)
    way = parser.parse_args().way
    if way is not None:
        measure(way)
        return
    print(
        f"{STEPS} steps of {STEP_BYTES >> 20} MiB\n\n| over | first | again | of the card |\n| --- | --- | --- | --- |"
    )
    for each in WAYS:
        subprocess.run([sys.executable, "-P", __file__, "--way", each], check=True, timeout=120)


if __name__ == "__main__":
    main()
