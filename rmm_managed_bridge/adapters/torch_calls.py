"""PyTorch's own calls about its memory, once the bridge is its allocator.

Its counters are its caching allocator's, and raise for any other. Set for good, as the allocator is.
"""

from collections.abc import Callable
from typing import Any

from rmm_managed_bridge import overview
from rmm_managed_bridge.frameworks.places import device_number


def tell_of_the_bridge(torch: Any) -> None:
    """Let PyTorch's calls answer with what the bridge knows; again makes no difference."""
    if getattr(torch.cuda.empty_cache, "tells_of_the_bridge", False):
        return
    mine: Any
    for mine in (_memory_allocated(torch), _memory_reserved(torch), _empty_cache(torch)):
        mine.__doc__ = getattr(torch.cuda, mine.__name__).__doc__
        mine.tells_of_the_bridge = True
        for module in (torch.cuda, torch.cuda.memory):
            setattr(module, mine.__name__, mine)


def _memory_allocated(torch: Any) -> Callable[..., int]:
    def memory_allocated(device: Any = None) -> int:
        return overview.live_bytes_of("torch", _number(torch, device))

    return memory_allocated


def _memory_reserved(torch: Any) -> Callable[..., int]:
    def memory_reserved(device: Any = None) -> int:
        return overview.reserved_bytes_on(_number(torch, device))

    return memory_reserved


def _empty_cache(torch: Any) -> Callable[[], None]:
    theirs = torch.cuda.empty_cache

    def empty_cache() -> None:
        theirs()
        overview.trim()

    return empty_cache


def _number(torch: Any, device: Any) -> int:
    if device is None or str(device) == "cuda":
        return int(torch.cuda.current_device())
    return device_number(device, "device", "")
