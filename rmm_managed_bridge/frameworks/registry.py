"""Which framework an object belongs to, and what is to be asked of that: streams, and whose memory it is.

A framework that is added gets a module beside this one and a line in each table that it has an answer for.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rmm_managed_bridge.frameworks import cupy, numpy, rmm, torch, warp

LEGACY = 0

HOOKED = ("numpy", "cupy", "warp", "torch")
"""Those that `install` knows how to hook, in the order in which it does."""

INTERNAL = (*HOOKED, "cupyx", "cupy_backends", "rmm", "cudf", "numba")
"""Packages whose own files are no place that a user would look for an allocation in."""

_CURRENT_STREAM: dict[str, Callable[[int], Any]] = {
    "cupy": cupy.current_stream,
    "warp": warp.current_stream,
    "torch": torch.current_stream,
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


def stream_of(x: Any, device: int | None) -> Any:
    """Return the stream that the framework of `x` enqueues work on now, as an object; None if it is not known."""
    name = framework_of(x)
    if name == "rmm":
        return rmm.buffer_stream(x)
    if name == "cupy" and "cupy" in sys.modules:
        return cupy.current_stream(-1 if device is None else device)
    current = _CURRENT_STREAM.get(name)
    return None if name == "cupy" or current is None or device is None or device < 0 else current(device)


def ambient_stream(device: int) -> Any:
    """Return the stream that work on memory of no framework most likely goes to: CuPy's, else Warp's, else 0."""
    if "cupy" in sys.modules:
        return cupy.current_stream(device)
    if "warp" in sys.modules and device >= 0:
        return warp.current_stream(device)
    return LEGACY


def current_streams(device: int) -> Iterator[Callable[[], Any]]:
    """Yield how to ask each imported framework for its current stream on a CUDA device."""
    for name, current in _CURRENT_STREAM.items():
        if name in sys.modules and (name != "torch" or torch.uses_cuda()):
            yield functools.partial(current, device)
