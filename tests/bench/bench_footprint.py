"""What a program takes of the card that works with CuPy, PyTorch and RMM in turn: with a pool each, and over one.

python tests/bench/bench_footprint.py

Each way in a process of its own. Takes 3 GiB of the card at most.
"""

import gc
import subprocess
import sys
from typing import Any

ARRAY_BYTES = 256 << 20
ROUNDS = 3
WAYS = ("a pool each", "one pool")


def set_up(way: str) -> None:
    import rmm

    managed = way == "one pool"
    rmm.reinitialize(
        pool_allocator=True,
        managed_memory=managed,
        initial_pool_size="64MiB",
        maximum_pool_size="3GiB" if managed else "2GiB",
    )
    if managed:
        import rmm_managed_bridge as bridge

        bridge.install(frameworks=["numpy", "cupy", "torch"])


def work_with_cupy(cupy: Any) -> list[Any]:
    x = cupy.ones(ARRAY_BYTES // 4, cupy.float32)
    y = x * 2
    return [x, y, x + y]


def work_with_torch(torch: Any) -> list[Any]:
    x = torch.ones(ARRAY_BYTES // 4, device="cuda")
    y = x * 2
    return [x, y, x + y]


def work_with_rmm(cupy: Any, rmm: Any) -> list[Any]:
    buffers = [rmm.DeviceBuffer(size=ARRAY_BYTES) for _ in range(3)]
    for each in buffers:
        memory = cupy.cuda.UnownedMemory(each.ptr, ARRAY_BYTES, each)
        cupy.ndarray(ARRAY_BYTES, "u1", cupy.cuda.MemoryPointer(memory, 0)).fill(1)
    return buffers


def measure(way: str) -> None:
    set_up(way)
    import cupy
    import rmm
    import torch

    torch.zeros(1, device="cuda")
    cupy.zeros(1)
    before = cupy.cuda.runtime.memGetInfo()[0]

    def taken() -> int:
        cupy.cuda.Device().synchronize()
        return (before - int(cupy.cuda.runtime.memGetInfo()[0])) >> 20

    most = 0
    for _ in range(ROUNDS):
        for work, arguments in (
            (work_with_cupy, (cupy,)),
            (work_with_torch, (torch,)),
            (work_with_rmm, (cupy, rmm)),
        ):
            kept = work(*arguments)
            most = max(most, taken())
            del kept
            gc.collect()
    print(f"| {way} | {most} MiB | {taken()} MiB |", flush=True)


def main() -> None:
    if len(sys.argv) > 1:
        measure(sys.argv[1])
        return
    print(
        "| CuPy, PyTorch and RMM over | most taken of the card | left when all was freed |\n| --- | --- | --- |",
        flush=True,
    )
    for way in WAYS:
        subprocess.run([sys.executable, "-P", __file__, way], check=True, timeout=120)


if __name__ == "__main__":
    main()
