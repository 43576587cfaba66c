"""CuPy."""

from typing import Any

from rmm_managed_bridge.frameworks.layout import Layout


def current_handle(device: int = -1) -> int:
    """Return the handle of CuPy's current stream on this thread, on `device` or the current one."""
    import cupy

    handle: int = cupy.cuda.get_current_stream(device).ptr
    return handle


def current_stream(device: int = -1) -> Any:
    """Return CuPy's current stream object on this thread, on `device` or the current one."""
    import cupy

    return cupy.cuda.get_current_stream(device)


def layout_of(x: Any) -> Layout:
    """Return how a CuPy array lies in memory."""
    return x.data.ptr, x.shape, None if x.flags.c_contiguous else x.strides, x.dtype, False


def keeps_stream(stream: Any) -> bool:
    """Return True unless the object may only wrap a handle.

    An ExternalStream is made from a number; Stream.from_external keeps the object that it was made from.
    """
    return type(stream).__name__ != "ExternalStream"


def owns_memory(x: Any) -> bool | None:
    """Return whether CuPy made the memory of an array; None if it is no array."""
    return type(x.data.mem).__name__ != "UnownedMemory" if hasattr(x, "data") else None
