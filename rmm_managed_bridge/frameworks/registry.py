"""Which framework an object belongs to, and what is to be asked of that: streams, and whose memory it is.

A framework that is added gets a module beside this one and a line in `FRAMEWORKS`.
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


class CurrentStream(NamedTuple):
    """How to ask a framework for the stream that it enqueues on now, on a CUDA device."""

    handle: Callable[[int], int]
    object: Callable[[int], Any]
    """What keeps the stream alive; takes much longer."""


class Framework(NamedTuple):
    """What can be asked of a framework's objects; None for what it does not tell."""

    name: str
    layout_of: Callable[[Any], Layout | None] | None = None
    """How an array lies in memory, where that is faster than to ask a protocol."""
    current: CurrentStream | None = None
    keeps_stream: Callable[[Any], bool] | None = None
    """True for a stream object that keeps its stream alive, False for one that may only wrap a handle."""
    owns_memory: Callable[[Any], bool | None] | None = None
    """Whether the framework made the memory of an array."""


CUPY = CurrentStream(cupy.current_handle, cupy.current_stream)
WARP = CurrentStream(warp.current_handle, warp.current_stream)
TORCH = CurrentStream(torch.current_handle, torch.current_stream)

FRAMEWORKS = {
    each.name: each
    for each in (
        Framework("numpy", numpy.layout_of, owns_memory=numpy.owns_memory),
        Framework("cupy", cupy.layout_of, CUPY, cupy.keeps_stream, cupy.owns_memory),
        Framework("warp", None, WARP, warp.keeps_stream, warp.owns_memory),
        Framework("torch", torch.layout_of, TORCH, torch.keeps_stream, torch.owns_memory),
        Framework("rmm", keeps_stream=rmm.keeps_stream, owns_memory=rmm.owns_memory),
        Framework("numba", keeps_stream=lambda stream: not getattr(stream, "external", True)),
        Framework("rmm_managed_bridge", keeps_stream=lambda stream: True),
    )
}
_NOBODY = Framework("")
_MOST_TYPES = 256
_by_type: dict[type, Framework] = {}
"""Of the frameworks' own classes, which last as long as the process."""


def framework_of(x: Any) -> str:
    """Return the top package that the type of `x` is from."""
    return type(x).__module__.partition(".")[0]


def framework_for(x: Any) -> Framework:
    """Return what can be asked of `x`."""
    kind = type(x)
    found = _by_type.get(kind)
    if found is None:
        found = FRAMEWORKS.get(framework_of(x), _NOBODY)
        # A class that is the module's own: others may come and go.
        if found is not _NOBODY and getattr(sys.modules.get(found.name), kind.__name__, None) is kind:
            if len(_by_type) >= _MOST_TYPES:
                _by_type.clear()
            _by_type[kind] = found
    return found


def owns_memory(x: Any) -> bool | None:
    """Return whether the framework of `x` made its memory; None if it does not tell."""
    ask = framework_for(x).owns_memory
    return None if ask is None else ask(x)


def keeps_stream(stream: Any) -> bool:
    """Return True for objects that are known to keep their stream alive, and False for what may only wrap a handle.

    Nothing is known of other libraries' objects. Those of cuda.core may wrap a handle, and be closed before their end.
    """
    owner = rmm.owner_of(stream) if framework_of(stream) == "rmm" else stream
    ask = framework_for(owner).keeps_stream
    return ask is not None and ask(owner)


def layout_of(x: Any, framework: Framework) -> Layout | None:
    """Return how an array lies in memory, if its framework is known to tell quickly; None for all others."""
    ask = framework.layout_of
    if ask is None:
        return None
    try:
        return ask(x)
    except (AttributeError, TypeError):  # of a class that is none of the framework's arrays
        return None


def is_lazy(x: Any) -> bool:
    """Return True if the values of `x` are not what lies in its memory."""
    return framework_of(x) == "torch" and torch.is_lazy(x)


def stream_in_use(x: Any, framework: Framework, device: int) -> CurrentStream | None:
    """Return how to ask for the stream that the framework of `x` enqueues work on now; None if it is not known."""
    current = framework.current
    if current is None:
        stream = rmm.buffer_stream(x) if framework.name == "rmm" else None
        return None if stream is None else CurrentStream(lambda device: stream_handle(stream), lambda device: stream)
    # CuPy knows of a current device where the memory has none.
    return current if framework.name in sys.modules and (device >= 0 or current is CUPY) else None


def stream_of(x: Any, device: int | None) -> Any:
    """Return the stream that the framework of `x` enqueues work on now, as an object; None if it is not known."""
    number = -1 if device is None else device
    current = stream_in_use(x, framework_for(x), number)
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
    for name, framework in FRAMEWORKS.items():
        if framework.current is not None and name in sys.modules and (name != "torch" or torch.uses_cuda()):
            yield framework.current
