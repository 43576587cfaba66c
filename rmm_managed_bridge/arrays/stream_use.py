"""Which streams use a block that was lent to another framework, while the loan lasts and when it ends."""

import sys
from typing import Any

from rmm_managed_bridge._native import blocks, ledger
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native.blocks import KnownArray, Loan
from rmm_managed_bridge.frameworks import registry, torch
from rmm_managed_bridge.frameworks.registry import CurrentStream
from rmm_managed_bridge.frameworks.streams import stream_handle


def lend(array: KnownArray, device: int, current: CurrentStream) -> tuple[Loan, int]:
    """Order the stream that is current now after the work on the block.

    Return what the view must keep, and the handle of the stream.
    """
    handle = _hand_over(array.ptr, _stream_in_use(array), device, blocks.STREAM, current)
    return Loan(array.source, array.ptr, device, current, hold), handle


def bring_home(array: KnownArray) -> None:
    """Wait for the work on the block, that of the framework's current stream included. Releases the GIL meanwhile."""
    if array.block is not None:
        _hand_over(array.ptr, _stream_in_use(array), array.block.device, blocks.CPU)


def note_use(x: Any, block: blocks.Block | None) -> None:
    """Hold and note the stream that the framework of `x` enqueues its work on now, as far as it tells."""
    if block is None:
        return
    hold_own_stream(block)
    used = registry.stream_in_use(x, registry.framework_for(x), block.device)
    if used is not None:
        _hand_over(block.start, used, block.device, blocks.NOBODY)


def hold(ptr: int, stream: Any) -> None:
    """Keep the stream object alive for as long as blocks may name it."""
    if not registry.keeps_stream(stream):
        return
    pool = native_pool.pool_containing(ptr)
    if pool is not None and not pool.holds(handle := stream_handle(stream)):
        pool.hold(handle, stream)


def hold_own_stream(block: blocks.Block) -> None:
    """Hold the stream that a block of PyTorch's was made on.

    PyTorch allocates without the GIL, so that the stream is held a little later, when the main thread comes to it: that
    may be in a `join` meanwhile.
    """
    if not block.borrowed or "torch" not in sys.modules:
        return
    allocation = ledger.allocation_of(block.start)
    if allocation is None or allocation.framework != "torch":
        return
    own = torch.own_streams(allocation.device).get(allocation.stream)
    if own is not None:
        hold(block.start, own)


def _hand_over(ptr: int, used: CurrentStream | None, device: int, to: int, user: CurrentStream | None = None) -> int:
    """See `blocks.hand_over`: streams that the bridge does not hold yet are held first. Return the handle of `user`."""
    used_handle = None if used is None else used.handle(device)
    handle = 0 if user is None else user.handle(device)
    if not blocks.hand_over(ptr, used_handle, to, handle):
        for current in (used, user):
            if current is not None:
                hold(ptr, current.object(device))
        blocks.hand_over(ptr, used_handle, to, handle, any_stream=True)
    return handle


def _stream_in_use(array: KnownArray) -> CurrentStream | None:
    block = array.block
    if block is None:
        return None
    if block.borrowed:
        hold_own_stream(block)
    framework = array.framework
    if framework.current is None and framework.name != "rmm":
        return None
    return registry.stream_in_use(array.source, framework, block.device)
