"""Telling the native core which streams use a block, and keeping the stream objects alive for it."""

from typing import Any

from rmm_managed_bridge import streams
from rmm_managed_bridge._native import blocks, core


def hold(ptr: int, stream: Any) -> None:
    """Keep the stream object alive for as long as blocks of the pool of `ptr` may name it."""
    if not streams.owns_its_stream(stream):
        return
    heap = core.heap_containing(ptr)
    if heap is not None and not heap.holds(handle := streams.stream_handle(stream)):
        heap.adopt(handle, stream)


def note_use(x: Any, ptr: int) -> None:
    """Hold and note the stream that the framework of `x` enqueues its work on now, as far as it tells."""
    stream = streams.stream_of(x, blocks.device_of(ptr))
    if stream is None and type(x).__name__ == "DeviceBuffer" and type(x).__module__.startswith("rmm."):
        from rmm_managed_bridge._native.bridge_resource import stream_of_buffer

        stream = stream_of_buffer(x)
    if stream is not None:
        hold(ptr, stream)
        blocks.expose(ptr, streams.stream_handle(stream))
