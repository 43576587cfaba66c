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
    """Return True for objects that are known to keep their stream alive, and False for what may only wrap a handle."""
    root = type(stream).__module__.partition(".")[0]
    if root == "cupy":
        # An ExternalStream is made from a number; Stream.from_external keeps the object that it was made from.
        return type(stream).__name__ != "ExternalStream"
    if root == "warp":
        return bool(getattr(stream, "owner", False))
    if root == "torch":
        # PyTorch never destroys its own streams. One that came from outside has its handle as its id.
        return int(stream.stream_id) != int(stream.cuda_stream)
    if root == "numba":
        return not getattr(stream, "external", True)
    # Nothing is known of others. Those of cuda.core may wrap a handle, and can be closed before their end.
    return root == "rmm_managed_bridge" or (root == "rmm" and type(stream).__name__ == "CudaStream")


def current_cupy_stream(device: int = -1) -> Any:
    """Return CuPy's current stream object on this thread, on `device` or the current one."""
    import cupy

    return cupy.cuda.get_current_stream(device)


def current_warp_stream(device: int) -> Any:
    """Return Warp's current stream object on a CUDA device."""
    import warp

    return warp.get_device(f"cuda:{device}").stream


def current_torch_stream(device: int) -> Any:
    """Return PyTorch's current stream object on this thread, on a CUDA device."""
    import torch

    return torch.cuda.current_stream(device)


@functools.cache
def torch_streams(device: int) -> dict[int, Any]:
    """Return handle and object of every stream that PyTorch itself makes on a device, but for the default one.

    It makes a fixed number for each priority, hands them out in turn for ever, and destroys none.
    """
    import torch

    found: dict[int, Any] = {}
    for priority in range(-4, 1):  # those that it does not have are mapped to the nearest that it has
        while (stream := torch.cuda.Stream(device=device, priority=priority)).cuda_stream not in found:
            found[stream.cuda_stream] = stream
    return found


def stream_of(x: Any, device: int | None) -> Any:
    """Return the stream that the framework of `x` enqueues work on now, as an object; None if it is not known."""
    root = type(x).__module__.partition(".")[0]
    if root == "cupy" and "cupy" in sys.modules:
        return current_cupy_stream(-1 if device is None else device)
    if root == "warp" and device is not None and device >= 0:
        return current_warp_stream(device)
    if root == "torch" and device is not None and device >= 0:
        return current_torch_stream(device)
    return None


def ambient_stream(device: int) -> Any:
    """Return the stream that work on memory of no framework most likely goes to: CuPy's, else Warp's, else 0."""
    if "cupy" in sys.modules:
        return current_cupy_stream(device)
    if "warp" in sys.modules and device >= 0:
        return current_warp_stream(device)
    return LEGACY


def current_streams(device: int) -> Iterator[Callable[[], Any]]:
    """Yield how to ask each imported framework for its current stream on a CUDA device."""
    for name, current in (
        ("cupy", current_cupy_stream),
        ("warp", current_warp_stream),
        ("torch", current_torch_stream),
    ):
        if name in sys.modules and (name != "torch" or sys.modules[name].cuda.is_initialized()):
            yield functools.partial(current, device)
