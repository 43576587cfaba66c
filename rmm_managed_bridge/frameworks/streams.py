"""Streams of all frameworks as handles."""

from typing import Any

from rmm_managed_bridge.errors import ViewError, is_array, shown


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
    order = "; the array comes first, record_stream(x, stream)" if is_array(stream) else ""
    raise ViewError(
        f"{shown(stream)} is not a stream; pass a CuPy, Warp, RMM or PyTorch stream, or a CUstream as an integer{order}"
    )
