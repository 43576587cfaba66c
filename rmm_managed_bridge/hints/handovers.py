"""What the policies do when memory passes between CPU and device. Nothing here raises: a hint never stops a view."""

import numpy as np

from rmm_managed_bridge._native import blocks, hint_table
from rmm_managed_bridge._native.blocks import KnownArray
from rmm_managed_bridge._native.hint_table import CPU, NOWHERE, PREFERRED, READ_MOSTLY
from rmm_managed_bridge.arrays.stream_use import hold, hold_own_stream
from rmm_managed_bridge.errors import BridgeError
from rmm_managed_bridge.frameworks.streams import stream_handle
from rmm_managed_bridge.hints import act, counters, policy
from rmm_managed_bridge.hints.act import Advice
from rmm_managed_bridge.hints.targets import Target, user_of

# Prefetching home moves whole arrays at 9.5 to 12 GB/s, faults move what is touched at 3.4 (docs/design/measured.md).
# Below this size the difference is under a millisecond, and reading a few elements is more likely.
HOME_BYTES = 4 << 20


def to_device(array: KnownArray, device: int, stream: int) -> None:
    """The array is about to be used by `device` on `stream`, which waits for the work on the block already."""
    hints = policy.hints_for(array.low)
    if hints.placement == "none" or array.size_bytes < hints.min_bytes:
        return
    target = Target(array.source, array.low, array.size_bytes, True)
    _, _, advice, accessors, _ = hint_table.hints_at(array.low)
    if hints.placement == "host":
        # Once for each block: the advice lasts as long as it does.
        if not (advice & PREFERRED and device in accessors):
            counters.count(act.advise(target, Advice(preferred=((CPU,),), accessed_by=((device,),))))
        return
    if hints.placement == "read_mostly" and not advice & READ_MOSTLY:
        counters.count(act.advise(target, Advice(read_mostly=True)))
    (result,) = act.prefetch([target], device, stream)
    counters.count(result)


def to_host(array: KnownArray) -> None:
    """The array is about to be used by the CPU, which will wait for the work on the block, this move included."""
    hints = policy.hints_for(array.low)
    if hints.placement != "device" or array.size_bytes < max(hints.min_bytes, HOME_BYTES):
        return
    # A device array was most likely written on the device since it came home last; a NumPy array says where it went.
    if isinstance(array.source, np.ndarray) and hint_table.hints_at(array.low)[4] in (CPU, NOWHERE):
        return
    target = Target(array.source, array.low, array.size_bytes, True)
    reason = target.refusal()
    if reason is not None:
        counters.count(act.skipped("prefetch", target, reason))
        return
    if array.block is not None:
        hold_own_stream(array.block)
    user = user_of(target)
    handle = stream_handle(user)
    hold(array.low, user)
    try:
        blocks.order(array.low, handle)
    except BridgeError:
        return  # a stream of the block is being captured: the wait that follows says so
    (result,) = act.prefetch([target], CPU, handle)
    counters.count(result)


def allocated(ptr: int, size_bytes: int, stream: int) -> None:
    """A GPU framework has a new block, to be used on `stream`."""
    hints = policy.hints_for(ptr)
    if hints.placement != "device" or size_bytes < hints.min_bytes:
        return
    target = Target(ptr, ptr, size_bytes, True)
    (result,) = act.prefetch([target], target.device, stream)
    counters.count(result)
