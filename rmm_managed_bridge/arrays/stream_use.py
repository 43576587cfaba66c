"""Which streams use a block that was lent to another framework, while the loan lasts and when it ends."""

import sys
from collections.abc import Callable
from typing import Any

from rmm_managed_bridge._native import blocks, ledger
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.arrays import streams
from rmm_managed_bridge.frameworks import registry, torch


class Loan:
    """Keeps the source of a device view, and notes when the view goes which stream may still be using it."""

    def __init__(self, source: Any, ptr: int, current_stream: Callable[[], Any] | None) -> None:
        self._source = source
        self._ptr = ptr
        self._current_stream = current_stream

    def __call__(self, ptr: int, size_bytes: int) -> None:
        """Do nothing: Warp's deleter. The bytes belong to the source."""

    def __del__(self) -> None:
        # The source's block may be freed right after this. During shutdown nothing is freed, so nothing need be noted.
        if self._current_stream is None or native_process.phase() != "running":
            return
        stream = self._current_stream()
        hold(self._ptr, stream)
        blocks.record_stream(self._ptr, streams.stream_handle(stream))


def lend(x: Any, ptr: int, current_stream: Callable[[], Any]) -> Loan:
    """Order the stream that is current now after the work on the block, and return what the view must keep."""
    stream = current_stream()
    note_use(x, ptr)
    hold(ptr, stream)
    blocks.order(ptr, streams.stream_handle(stream))
    return Loan(x, ptr, current_stream)


def hold(ptr: int, stream: Any) -> None:
    """Keep the stream object alive for as long as blocks may name it."""
    if not registry.keeps_stream(stream):
        return
    pool = native_pool.pool_containing(ptr)
    if pool is not None and not pool.holds(handle := streams.stream_handle(stream)):
        pool.hold(handle, stream)


def note_use(x: Any, ptr: int) -> None:
    """Hold and note the stream that the framework of `x` enqueues its work on now, as far as it tells."""
    if "torch" in sys.modules:
        _hold_torchs_own(ptr)
    stream = registry.stream_of(x, blocks.device_of(ptr))
    if stream is not None:
        hold(ptr, stream)
        blocks.record_stream(ptr, streams.stream_handle(stream))


def _hold_torchs_own(ptr: int) -> None:
    """Hold the stream that a block of PyTorch's was made on.

    PyTorch allocates without the GIL, so that the stream is held a little later, when the main thread comes to it: that
    may be in a `join` meanwhile.
    """
    allocation = ledger.allocation_of(ptr)
    if allocation is None or allocation.framework != "torch":
        return
    pool = native_pool.pool_containing(ptr)
    if pool is not None and not pool.holds(allocation.stream):
        own = torch.own_streams(allocation.device).get(allocation.stream)
        if own is not None:
            pool.hold(allocation.stream, own)
