"""The hints that a program gives itself: prefetch, advise, discard, and residency to read them back."""

import enum
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from rmm_managed_bridge._native import hint_table
from rmm_managed_bridge.errors import BridgeError, ConfigError, is_array, shown
from rmm_managed_bridge.frameworks.streams import stream_handle
from rmm_managed_bridge.hints import act, counters, driver, pages
from rmm_managed_bridge.hints.locations import name_of, place_of
from rmm_managed_bridge.hints.results import HintResult, HintSkip, Residency
from rmm_managed_bridge.hints.targets import target_of, targets_of


class _Unchanged(enum.Enum):
    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "UNCHANGED"


_UNCHANGED: Final = _Unchanged.UNCHANGED


def prefetch(x: Any, to: Any, stream: Any = None, *, strict: bool = False) -> HintResult:
    """Move memory to a device or to the CPU before it is used there, instead of by page faults when it is.

    Parameters
    ----------
    x
        An array of any framework, a slice of one, an address (for its whole block), a pair (address, size_bytes), or a
        list of these for one call. Of arrays that are not contiguous, all from the lowest to the highest byte.
    to
        ``"cpu"``, ``"cuda:0"``, a device number, or a device object of a framework; ``"cuda"`` is device 0.
    stream
        A stream of any framework, or a handle: the move begins after the work on it so far, and the work on it from now
        on begins after the move. By default the one that the framework of `x` enqueues on now; for NumPy arrays and
        addresses CuPy's current one, else Warp's.
    strict
        Raise instead of skipping.

    Returns
    -------
    HintResult
        True in a condition if the driver took it for all of `x`; else its `reason` says why not. Pages at the ends that
        are shared with other blocks move as a whole, and `sharing_count` says with how many.

    Raises
    ------
    ConfigError, ViewError
        If `to` or `x` is not what it should be.
    BridgeError
        With `strict`, if it was skipped.

    Notes
    -----
    Does not wait, and never changes contents. May be called from any thread. Not given on a stream that is being
    captured: it would become part of the graph, and move memory at each replay.

    Examples
    --------
    >>> field = np.ones(1 << 20, np.float32)
    >>> done = bridge.prefetch(field, "cpu")
    >>> bool(done), str(done.reason)
    (False, 'host memory')
    """
    place = place_of(to)
    targets, several = targets_of(x)
    given = None if stream is None else stream_handle(stream)
    return _conclude("prefetch", act.prefetch(targets, place, given), several, strict)


def advise(
    x: Any,
    *,
    read_mostly: bool | None = None,
    preferred_location: Any = _UNCHANGED,
    accessed_by: Any = _UNCHANGED,
    strict: bool = False,
) -> HintResult:
    """Tell the driver how memory will be used from now on. Ends with the block, or when it is reset.

    Parameters
    ----------
    x
        As for `prefetch`.
    read_mostly : bool, optional
        True: each processor that reads a page keeps a copy, until somebody writes to it. False resets it.
    preferred_location : place, optional
        Where pages stay if they can: ``"cpu"`` or a device. A processor that reaches them there does so without moving
        them. None resets it.
    accessed_by : place or sequence of places, optional
        Who keeps the pages mapped, so that they are reached without a fault wherever they lie: all of those who do,
        from now on. None resets it.
    strict
        Raise instead of skipping.

    Returns
    -------
    HintResult
        As for `prefetch`. The first or last page may be shared with other blocks, which then feel the advice.

    Raises
    ------
    ConfigError, ViewError
        If an argument is not what it should be.
    BridgeError
        With `strict`, if it was skipped.

    Notes
    -----
    Acts at once, in no stream's order, and never changes contents. May be called from any thread.

    Advice belongs to pages. It is reset when the block is freed, from every page on which no other advised block
    lies; where one does, with that one. An array that is resized and moves loses it. Where two blocks on one page were
    given different advice, the page has both, and the last preferred location.

    Examples
    --------
    >>> field = np.ones(1 << 20, np.float32)
    >>> str(bridge.advise(field, preferred_location="cpu").reason)
    'host memory'
    """
    if read_mostly is not None and not isinstance(read_mostly, bool | np.bool_):
        raise ConfigError(f"read_mostly={shown(read_mostly)} is not True, False or None")
    steps = act.Advice(
        read_mostly=None if read_mostly is None else bool(read_mostly),
        preferred=None if preferred_location is _UNCHANGED else (_places(preferred_location, "preferred_location"),),
        accessed_by=None if accessed_by is _UNCHANGED else (_places(accessed_by, "accessed_by"),),
    )
    targets, several = targets_of(x)
    return _conclude("advise", [act.advise(target, steps) for target in targets], several, strict)


def discard(x: Any, *, strict: bool = False) -> HintResult:
    """Let the contents of memory go, so that it need not be moved, nor written back when the device runs full.

    Parameters
    ----------
    x
        As for `prefetch`, but arrays with holes are skipped: the bytes in between are somebody else's.
    strict
        Raise instead of skipping.

    Returns
    -------
    HintResult
        As for `prefetch`. Only pages that lie in `x` as a whole are discarded: the first and the last bytes may stay.

    Raises
    ------
    ViewError
        If `x` is not what it should be.
    BridgeError
        With `strict`, if it was skipped.

    Notes
    -----
    What is read before it is written again is anything, and may differ from read to read. The contents go after the
    device work that the bridge knows of on the block; then the stream of the framework of `x` waits for that, and for
    NumPy arrays and addresses the CPU does, with the GIL released. Needs a driver for CUDA 12.8 or newer.

    Examples
    --------
    >>> scratch = np.ones(1 << 20, np.float32)
    >>> str(bridge.discard(scratch).reason)
    'host memory'
    """
    targets, several = targets_of(x)
    return _conclude("discard", [act.discard(target) for target in targets], several, strict)


def residency(x: Any) -> Residency:
    """Return where the memory of one array is wanted: what the bridge last asked for, and what the driver says.

    Parameters
    ----------
    x
        An array of any framework, an address, or a pair (address, size_bytes).

    Returns
    -------
    Residency
        On the host backend, and for memory that is not the bridge's, with a `reason` and nothing else.

    Raises
    ------
    ViewError
        If `x` has no address.

    Examples
    --------
    >>> print(bridge.residency(np.ones(1 << 20)))
    residency not known: host memory (it is on the CPU for good; nothing moves, so nothing need be asked)
    """
    target = target_of(x)
    reason = target.refusal()
    if reason is not None:
        return Residency(asked=None, reason=reason)
    asked = name_of(hint_table.hints_at(target.ptr)[4])
    try:
        with hint_table.driver_scope(target.ptr):
            found = driver.load().attributes(pages.outwards(target.ptr, target.size_bytes))
    except driver.NoLibraryError:
        return Residency(asked, reason=HintSkip.NO_LIBRARY)
    except driver.DriverRefusedError:
        return Residency(asked, reason=HintSkip.REFUSED)
    return Residency(
        asked=asked,
        last_prefetch=name_of(found.last_prefetch),
        read_mostly=found.read_mostly,
        preferred_location=name_of(found.preferred),
        accessed_by=tuple(name for place in found.accessed_by if (name := name_of(place)) is not None),
    )


def _places(value: Any, name: str) -> tuple[int, ...]:
    if value is None:
        return ()
    several = isinstance(value, Iterable) and not isinstance(value, str) and not is_array(value)
    order = f"the array comes first, advise(x, {name}='cpu')"
    return tuple(dict.fromkeys(place_of(each, name, order) for each in (value if several else [value])))


def _conclude(action: str, results: list[HintResult], several: bool, strict: bool) -> HintResult:
    """Count each result, and make one of them."""
    for each in results:
        counters.count(each)
    if not several:
        (result,) = results
    else:
        failed = [each for each in results if not each]
        first = failed[0] if failed else None
        result = HintResult(
            action,
            done=bool(results) and not failed,
            reason=HintSkip.NOTHING_ASKED if not results else None if first is None else first.reason,
            ptr=min((each.ptr for each in results if each), default=0),
            size_bytes=sum(each.size_bytes for each in results),
            sharing_count=sum(each.sharing_count for each in results),
            detail="" if first is None else first.detail,
            parts=tuple(results),
        )
    if strict and not result:
        raise BridgeError(str(result))
    return result
