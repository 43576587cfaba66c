"""Warp."""

from typing import Any


def current_stream(device: int) -> Any:
    """Return Warp's current stream object on a CUDA device."""
    import warp

    return warp.get_device(f"cuda:{device}").stream


def keeps_stream(stream: Any) -> bool:
    """Return True if the object destroys its stream, and so keeps it till then."""
    return bool(getattr(stream, "owner", False))


def owns_memory(x: Any) -> bool:
    """Return whether Warp made the memory of an array, or of the one that it is a view of."""
    while (source := getattr(x, "_ref", None)) is not None and hasattr(source, "ptr"):
        x = source
    return getattr(x, "_allocator", None) is not None
