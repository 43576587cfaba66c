"""Streams of all frameworks as handles, and the frameworks' current ones."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rmm_managed_bridge.errors import ViewError

LEGACY = 0


def stream_handle(stream: Any) -> int:
    """Return the CUstream of a stream object of any framework, or of an integer handle.

    Raises
    ------
    ViewError
        If it is not a stream.
    """
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1] if callable(protocol) else protocol[1])
    for name in ("ptr", "cuda_stream", "handle"):
        found = getattr(stream, name, None)
        if found is not None:
            return int(getattr(found, "value", found) or 0)
    raise ViewError(
        f"{stream!r} is not a stream; pass a CuPy, Warp, RMM or PyTorch stream, or a CUstream as an integer"
    )


def owns_its_stream(stream: Any) -> bool:
    """Return False for objects that only wrap a handle: the stream may be destroyed while they are alive."""
    root = type(stream).__module__.partition(".")[0]
    if root == "cupy":
        # An ExternalStream is made from a number; Stream.from_external keeps the object that it was made from.
        return type(stream).__name__ != "ExternalStream"
    if root == "warp":
        return bool(getattr(stream, "owner", False))
    return not isinstance(stream, int)


def current_cupy_stream(device: int = -1) -> Any:
    """Return CuPy's current stream object on this thread, on `device` or the current one."""
    import cupy

    return cupy.cuda.get_current_stream(device)


def current_warp_stream(device: int) -> Any:
    """Return Warp's current stream object on a CUDA device."""
    import warp

    return warp.get_device(f"cuda:{device}").stream


def stream_of(x: Any, device: int | None) -> Any:
    """Return the stream that the framework of `x` enqueues work on now, as an object; None if it is not known."""
    root = type(x).__module__.partition(".")[0]
    if root == "cupy" and "cupy" in sys.modules:
        return current_cupy_stream(-1 if device is None else device)
    if root == "warp" and device is not None and device >= 0:
        return current_warp_stream(device)
    return None


def current_torch_stream(device: int) -> Any:
    """Return PyTorch's current stream object on a CUDA device."""
    import torch

    return torch.cuda.current_stream(device)


def current_streams(device: int) -> Iterator[Callable[[], Any]]:
    """Yield how to ask each imported framework for its current stream on a CUDA device."""
    for name, current in (
        ("cupy", current_cupy_stream),
        ("warp", current_warp_stream),
        ("torch", current_torch_stream),
    ):
        if name in sys.modules and (name != "torch" or sys.modules[name].cuda.is_initialized()):
            yield functools.partial(current, device)
