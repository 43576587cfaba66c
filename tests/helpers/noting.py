"""A resource of RMM's that stands between two others and notes which streams it is called with."""

import ctypes
from typing import Any, TypeVar

from rmm_managed_bridge.frameworks.streams import stream_handle

T = TypeVar("T")
Call = tuple[str, str, int]


def for_ever(x: T) -> T:
    """Keep `x` also past the interpreter's end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
    return x


def noting(upstream: Any, place: str, calls: list[Call]) -> Any:
    """Return a resource that adds (place, call, stream handle) to `calls` and passes each call on to `upstream`."""
    import rmm.mr

    class Noting(rmm.mr.CallbackMemoryResource):
        upstream_mr: Any = None  # by which the bridge finds out what kind of memory this is

    def allocate(size_bytes: int, stream: Any) -> int:
        calls.append((place, "allocate", stream_handle(stream)))
        return int(upstream.allocate(size_bytes, stream))

    def deallocate(ptr: int, size_bytes: int, stream: Any) -> None:
        calls.append((place, "deallocate", stream_handle(stream)))
        upstream.deallocate(ptr, size_bytes, stream)

    made = Noting(allocate, deallocate)
    made.upstream_mr = upstream
    return made
