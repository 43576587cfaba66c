"""Zeros of managed memory that was used before: written by several threads, all of them and nothing else."""

import ctypes

import pytest
from fake_cuda import FakeCuda
from fake_cuda.pool import MIB, Bench

from rmm_managed_bridge._native.numpy_handler import NumpyHandler

pytestmark = pytest.mark.fake_driver

_handlers: list[NumpyHandler] = []  # a handler of NumPy's lives for ever


@pytest.mark.parametrize("size_bytes", [MIB, 8 * MIB, 8 * MIB + 1, 24 * MIB - 8, 33 * MIB + 4097])
def test_every_byte_is_zero_and_none_around_is_touched(fake: FakeCuda, size_bytes: int) -> None:
    bench = Bench(fake)
    handler = NumpyHandler()
    _handlers.append(handler)
    handler.use(bench.heap)
    blocks = [handler.malloc(size_bytes) for _ in range(3)]
    for ptr in blocks:
        ctypes.memset(ptr, 0xAB, size_bytes)
    for ptr in blocks[:2]:
        handler.free(ptr, size_bytes)
    again = [handler.calloc(1, size_bytes) for _ in range(2)]
    assert set(again) & set(blocks[:2]), "none of what was written before is used again"
    for ptr in again:
        assert ctypes.string_at(ptr, size_bytes) == bytes(size_bytes)
    assert ctypes.string_at(blocks[2], size_bytes) == b"\xab" * size_bytes
    for ptr in (*again, blocks[2]):
        handler.free(ptr, size_bytes)
    handler.use(None)
