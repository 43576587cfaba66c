"""Small blocks that the CPU and the GPU use in turn: on pages of their own, as the pool keeps them, against mixed."""

import ctypes

import cupy
import numpy as np
from measure import Row, best_ns

from rmm_managed_bridge._native import pool as native_pool

COUNT = 4096
SIZE_BYTES = 2048

_TOUCH = r"""
extern "C" __global__ void touch(char** blocks, int bytes) {
    char* block = blocks[blockIdx.x];
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) block[i] += 1;
}
"""


def side_rows() -> list[Row]:
    """Return one row: a turn of the CPU and the GPU over 4,096 blocks each, with the bridge installed on device 0."""
    touch = cupy.RawKernel(_TOUCH, "touch")
    apart, mixed = _turn_ns(touch, cpu=True), _turn_ns(touch, cpu=False)
    return [Row("CPU and GPU in turn, 2 KiB blocks apart", apart, "the same blocks mixed", mixed, 0.5)]


def _turn_ns(touch: cupy.RawKernel, *, cpu: bool) -> float:
    """`cpu`: whether the CPU's blocks come from its side of the pool; else each lies between two of the GPU's."""
    heap = native_pool.pool_serving(0)
    pairs = [(heap.allocate(SIZE_BYTES, cpu=cpu), heap.allocate(SIZE_BYTES)) for _ in range(COUNT)]
    mine = [each for each, _ in pairs]
    theirs = cupy.asarray(np.array([each for _, each in pairs], "u8"))

    def turn() -> None:
        for ptr in mine:
            ctypes.memset(ptr, 1, SIZE_BYTES)
        touch((COUNT,), (128,), (theirs, np.int32(SIZE_BYTES)))
        cupy.cuda.runtime.deviceSynchronize()

    time_ns = best_ns(turn, count=5, repeats=5)
    for pair in pairs:
        for ptr in pair:
            heap.deallocate(ptr)
    return time_ns
