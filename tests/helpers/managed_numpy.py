"""NumPy arrays in the fake driver's managed memory, and what becomes of them in forked children."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from fake_cuda.pool import Bench

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.lifecycle import forks


class Managed:
    """Makes arrays of NumPy's own in the pool of a bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def arange(self, length: int) -> "np.ndarray[Any, Any]":
        """Return the numbers up to `length`."""
        with bridge.numpy_allocator("managed"):
            return np.arange(length)

    def full(self, length: int, value: int) -> "np.ndarray[Any, Any]":
        """Return `length` times the same number."""
        with bridge.numpy_allocator("managed"):
            return np.full(length, value)

    def owns(self, array: "np.ndarray[Any, Any]") -> bool:
        """Return True if the array lies in the bench's pool."""
        return native_pool.pool_containing(array.ctypes.data) is self.bench.heap

    @contextlib.contextmanager
    def forks(self, mode: str, limit_bytes: int | None = None) -> Iterator[None]:
        """Have forks treated so, as `install` would be told."""
        before = forks._mode, forks._limit_bytes
        forks._warned = False
        forks.watch(mode, limit_bytes)
        try:
            yield
        finally:
            forks.watch(*before)
            forks._warned = False


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], tuple[int, int, int]]]:
    """Give a function that returns what rose since: forks that copied, bytes given to children, bytes copied."""
    before = native_process.fork_counters()

    def risen() -> tuple[int, int, int]:
        count, given, copied, _ = (now - then for now, then in zip(native_process.fork_counters(), before, strict=True))
        return count, given, copied

    yield risen


def read_dies(address: int) -> bool:
    """Return True if a forked child that reads a byte there is killed."""
    child = os.fork()
    if child == 0:
        ctypes.string_at(address, 1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WTERMSIG(status) == signal.SIGSEGV
    return status != 0
