"""Which framework an object belongs to, and what is to be asked of that: streams, and whose memory it is.

A framework that is added gets a module beside this one and a line in each table that it has an answer for.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rmm_managed_bridge.frameworks import cupy, numpy, rmm, torch, warp
from rmm_managed_bridge.frameworks.layout import Layout
from rmm_managed_bridge.frameworks.streams import stream_handle

LEGACY = 0

HOOKED = ("numpy", "cupy", "warp", "torch")
"""Those that `install` knows how to hook, in the order in which it does."""

INTERNAL = (*HOOKED, "cupyx", "cupy_backends", "rmm", "cudf", "numba")
"""Packages whose own files are no place that a user would look for an allocation in."""


class CurrentStream(NamedTuple):
    """How to ask a framework for the stream that it enqueues on now, on a CUDA device."""

    handle: Callable[[int], int]
    object: Callable[[int], Any]
    """What keeps the stream alive; takes much longer."""


CUPY = CurrentStream(cupy.current_handle, cupy.current_stream)
WARP = CurrentStream(warp.current_handle, warp.current_stream)
TORCH = CurrentStream(torch.current_handle, torch.current_stream)

_CURRENT_STREAM = {"cupy": CUPY, "warp": WARP, "torch": TORCH}
_LAYOUT_OF: dict[str, Callable[[Any], Layout | None]] = {
    "numpy": numpy.layout_of,
    "cupy": cupy.layout_of,
    "torch": torch.layout_of,
}
_KEEPS_STREAM: dict[str, Callable[[Any], bool]] = {
    "cupy": cupy.keeps_stream,
    "warp": warp.keeps_stream,
    "torch": torch.keeps_stream,
    "rmm": rmm.keeps_stream,
    "numba": lambda stream: not getattr(stream, "external", True),
    "rmm_managed_bridge": lambda stream: True,
}
_OWNS_MEMORY: dict[str, Callable[[Any], bool | None]] = {
    "numpy": numpy.owns_memory,
    "cupy": cupy.owns_memory,
    "warp": warp.owns_memory,
    "torch": torch.owns_memory,
    "rmm": rmm.owns_memory,
}


def framework_of(x: Any) -> str:
    """Return the top package that the type of `x` is from."""
    return type(x).__module__.partition(".")[0]


def owns_memory(x: Any) -> bool | None:
    """Return whether the framework of `x` made its memory; None if it does not tell."""
    ask = _OWNS_MEMORY.get(framework_of(x))
    return None if ask is None else ask(x)


def keeps_stream(stream: Any) -> bool:
    """Return True for objects that are known to keep their stream alive, and False for what may only wrap a handle.

    Nothing is known of other libraries' objects. Those of cuda.core may wrap a handle, and be closed before their end.
    """
    owner = rmm.owner_of(stream) if framework_of(stream) == "rmm" else stream
    ask = _KEEPS_STREAM.get(framework_of(owner))
    return ask is not None and ask(owner)


def layout_of(x: Any, framework: str) -> Layout | None:
    """Return how an array lies in memory, if its framework is known to tell quickly; None for all others."""
    ask = _LAYOUT_OF.get(framework)
    try:
        return None if ask is None else ask(x)
    except (AttributeError, TypeError):  # of a class that is none of the framework's arrays
        return None


def is_lazy(x: Any) -> bool:
    """Return True if the values of `x` are not what lies in its memory."""
    return framework_of(x) == "torch" and torch.is_lazy(x)


def stream_in_use(x: Any, framework: str, device: int) -> CurrentStream | None:
    """Return how to ask for the stream that the framework of `x` enqueues work on now; None if it is not known."""
    if framework == "rmm":
        stream = rmm.buffer_stream(x)
        return None if stream is None else CurrentStream(lambda device: stream_handle(stream), lambda device: stream)
    current = _CURRENT_STREAM.get(framework)
    # CuPy knows of a current device where the memory has none.
    if current is None or framework not in sys.modules or (device < 0 and current is not CUPY):
        return None
    return current


def stream_of(x: Any, device: int | None) -> Any:
    """Return the stream that the framework of `x` enqueues work on now, as an object; None if it is not known."""
    number = -1 if device is None else device
    current = stream_in_use(x, framework_of(x), number)
    return None if current is None else current.object(number)


def ambient_stream(device: int) -> Any:
    """Return the stream that work on memory of no framework most likely goes to: CuPy's, else Warp's, else 0."""
    if "cupy" in sys.modules:
        return cupy.current_stream(device)
    if "warp" in sys.modules and device >= 0:
        return warp.current_stream(device)
    return LEGACY


def current_streams() -> Iterator[CurrentStream]:
    """Yield how to ask each imported framework for its current stream on a CUDA device."""
    for name, current in _CURRENT_STREAM.items():
        if name in sys.modules and (name != "torch" or torch.uses_cuda()):
            yield current
