"""RMM: buffers and streams of its own, and streams that it wraps for others."""

from typing import Any


def owner_of(stream: Any) -> Any:
    """Return the object behind a `Stream` of RMM's, which is as good as what it wraps; anything else as it is."""
    if type(stream).__name__ != "Stream":
        return stream
    from rmm_managed_bridge._native.rmm_resource import owner_of

    return owner_of(stream)


def keeps_stream(stream: Any) -> bool:
    """Return True for a stream that RMM has made."""
    return type(stream).__name__ == "CudaStream"


def buffer_stream(x: Any) -> Any:
    """Return the stream that an `rmm.DeviceBuffer` was made on and will be freed on; None if it is no buffer."""
    if type(x).__name__ != "DeviceBuffer":
        return None
    from rmm_managed_bridge._native.rmm_resource import stream_of_buffer

    return stream_of_buffer(x)


def owns_memory(x: Any) -> bool:
    """Return True: its buffers are over memory of its resource."""
    return True
