"""Arrays of another framework over the same bytes.

What a view promises: no byte is copied; the view keeps its source alive; a device view is ordered after the work that
the bridge knows of on the block, and a NumPy view waits for it. What it cannot promise: order against work on a stream
that the bridge never saw. `record_stream` tells it of one.
"""

from typing import Any

from rmm_managed_bridge._native import blocks
from rmm_managed_bridge._native.blocks import KnownArray, Loan
from rmm_managed_bridge.arrays.address import address_of
from rmm_managed_bridge.arrays.layout import known, not_ours, require_plain
from rmm_managed_bridge.arrays.stream_use import hold, lend
from rmm_managed_bridge.errors import ViewError
from rmm_managed_bridge.frameworks.registry import CurrentStream
from rmm_managed_bridge.frameworks.streams import stream_handle
from rmm_managed_bridge.hints import handovers, policy


def owns(x: Any) -> bool:
    """Return True if `x`, an array of any framework or an address, lies in a live block of the bridge.

    Parameters
    ----------
    x
        An array of any framework, or an address.

    Returns
    -------
    bool
        Also of a view, a slice, or an address inside a block.

    Raises
    ------
    ViewError
        If `x` has no address.

    Examples
    --------
    >>> bridge.owns(np.ones(1000)), bridge.owns(np.frombuffer(b"text", np.uint8))
    (True, False)
    """
    return blocks.find(address_of(x).ptr) is not None


def record_stream(x: Any, stream: Any) -> None:
    """Tell the bridge that work on `stream` may touch `x`, so that the block is not reused before that work is done.

    Parameters
    ----------
    x
        An array of any framework, or an address inside a block.
    stream
        A stream object of any framework, which the bridge keeps alive as long as it needs it, or a handle, which must
        then outlive the block.

    Raises
    ------
    ViewError
        If `x` is not in a live block of the bridge.
    BridgeError
        If the stream is being captured.

    Examples
    --------
    >>> x = np.ones(1000)
    >>> bridge.record_stream(x, 0)  # the default stream; on the host backend nothing is waited for
    """
    ptr = address_of(x).ptr
    hold(ptr, stream)
    if not blocks.record_stream(ptr, stream_handle(stream)):
        raise ViewError(not_ours(x))


def described(x: Any, consumer: str, *, allow_readonly: bool) -> KnownArray:
    """Return where and what `x` is, if `consumer` can have such arrays."""
    array = known(x)
    if not array.plain:
        require_plain(array, consumer, allow_readonly=allow_readonly)
    return array


def lend_to(array: KnownArray, device: int, current: CurrentStream) -> Loan:
    """Order the framework's current stream after the work on the block, and give the hints that are in use there."""
    loan, stream = lend(array, device, current)
    if policy.in_use():
        handovers.to_device(array, device, stream)
    return loan


def import_framework(name: str) -> Any:
    """Return a framework's module."""
    try:
        # Faster than importlib for what is imported already, and it waits likewise for another thread's import.
        return __import__(name)
    except ImportError as error:
        raise ViewError(f"{name} cannot be imported ({error}); install it to get its arrays") from None
