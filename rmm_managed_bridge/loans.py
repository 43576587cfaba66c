"""Which streams use a block that was lent to another framework, while the loan lasts and when it ends."""

import sys
from collections.abc import Callable
from typing import Any

from rmm_managed_bridge import streams
from rmm_managed_bridge._native import blocks, core, ledger


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
        if self._current_stream is None or core.phase() != "running":
            return
        stream = self._current_stream()
        hold(self._ptr, stream)
        blocks.expose(self._ptr, streams.stream_handle(stream))


def lend(x: Any, ptr: int, current_stream: Callable[[], Any]) -> Loan:
    """Order the stream that is current now after the work on the block, and return what the view must keep."""
    stream = current_stream()
    note_use(x, ptr)
    hold(ptr, stream)
    blocks.order(ptr, streams.stream_handle(stream))
    return Loan(x, ptr, current_stream)


def hold(ptr: int, stream: Any) -> None:
    """Keep the stream object alive for as long as blocks may name it."""
    if not keeps_its_stream(stream):
        return
    heap = core.heap_containing(ptr)
    if heap is not None and not heap.holds(handle := streams.stream_handle(stream)):
        heap.adopt(handle, stream)


def keeps_its_stream(stream: Any) -> bool:
    """Return whether the stream lives as long as the object. A Stream of RMM's is as good as what it wraps."""
    if type(stream).__name__ == "Stream" and type(stream).__module__.startswith("rmm."):
        from rmm_managed_bridge._native.bridge_resource import owner_of

        stream = owner_of(stream)
    return streams.owns_its_stream(stream)


def note_use(x: Any, ptr: int) -> None:
    """Hold and note the stream that the framework of `x` enqueues its work on now, as far as it tells."""
    if "torch" in sys.modules:
        _hold_torchs_own(ptr)
    stream = streams.stream_of(x, blocks.device_of(ptr))
    if stream is None and type(x).__name__ == "DeviceBuffer" and type(x).__module__.startswith("rmm."):
        from rmm_managed_bridge._native.bridge_resource import stream_of_buffer

        stream = stream_of_buffer(x)
    if stream is not None:
        hold(ptr, stream)
        blocks.expose(ptr, streams.stream_handle(stream))


def _hold_torchs_own(ptr: int) -> None:
    """Hold the stream that a block of PyTorch's was made on.

    PyTorch allocates without the GIL, so that the stream is held a little later, when the main thread comes to it: that
    may be in a `join` meanwhile.
    """
    allocation = ledger.allocation_of(ptr)
    if allocation is None or allocation.framework != "torch":
        return
    heap = core.heap_containing(ptr)
    if heap is not None and not heap.holds(allocation.stream):
        own = streams.torch_streams(allocation.device).get(allocation.stream)
        if own is not None:
            heap.adopt(allocation.stream, own)
