"""PyTorch."""

import functools
import sys
from typing import Any


def current_stream(device: int) -> Any:
    """Return PyTorch's current stream object on this thread, on a CUDA device."""
    import torch

    return torch.cuda.current_stream(device)


def keeps_stream(stream: Any) -> bool:
    """Return True for PyTorch's own streams, which it never destroys. One from outside has its handle as its id."""
    return int(stream.stream_id) != int(stream.cuda_stream)


def owns_memory(x: Any) -> bool:
    """Return True: nothing tells of a tensor that it is over other memory."""
    return True


def uses_cuda() -> bool:
    """Return True once PyTorch has used CUDA: to ask it for a stream before would start it up."""
    return bool(sys.modules["torch"].cuda.is_initialized())


@functools.cache
def own_streams(device: int) -> dict[int, Any]:
    """Return handle and object of every stream that PyTorch itself makes on a device, but for the default one.

    It makes a fixed number for each priority, hands them out in turn for ever, and destroys none.
    """
    import torch

    found: dict[int, Any] = {}
    for priority in range(-4, 1):  # those that it does not have are mapped to the nearest that it has
        while (stream := torch.cuda.Stream(device=device, priority=priority)).cuda_stream not in found:
            found[stream.cuda_stream] = stream
    return found
