"""Warp."""

import functools
from typing import Any


@functools.cache
def device_object(number: int) -> Any:
    """Return Warp's object for a CUDA device; there is one for the life of the process."""
    import warp

    return warp.get_device(f"cuda:{number}")


def current_handle(device: int) -> int:
    """Return the handle of Warp's current stream on a CUDA device."""
    handle = device_object(device).stream.cuda_stream
    return handle if type(handle) is int else int(getattr(handle, "value", handle) or 0)


def current_stream(device: int) -> Any:
    """Return Warp's current stream object on a CUDA device."""
    return device_object(device).stream


def keeps_stream(stream: Any) -> bool:
    """Return True if the object destroys its stream, and so keeps it till then."""
    return bool(getattr(stream, "owner", False))


def owns_memory(x: Any) -> bool:
    """Return whether Warp made the memory of an array, or of the one that it is a view of."""
    while (source := getattr(x, "_ref", None)) is not None and hasattr(source, "ptr"):
        x = source
    return getattr(x, "_allocator", None) is not None
