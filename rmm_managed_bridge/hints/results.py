"""What became of a hint."""

import enum
from dataclasses import dataclass

from rmm_managed_bridge.units import format_bytes


class HintSkip(enum.StrEnum):
    """Why a hint was not given. `bridge.stats()` counts them under these texts.

    Examples
    --------
    >>> bridge.prefetch(np.ones(1 << 20), "cpu").reason is bridge.HintSkip.HOST
    True
    """

    ENDED = "the process was forked or is exiting"
    EMPTY = "no bytes"
    FOREIGN = "foreign memory"
    HOST = "host memory"
    NOT_MANAGED = "not managed memory"
    NO_CONCURRENT_ACCESS = "no concurrent managed access"
    CAPTURING = "the stream is being captured"
    BAD_STREAM = "not a stream of this device"
    LARGER_THAN_DEVICE = "larger than the device"
    LESS_THAN_A_PAGE = "less than a whole page"
    HOLES = "the array has holes"
    UNORDERED = "work on it cannot be waited for"
    NO_LIBRARY = "no CUDA library for Python"
    REFUSED = "the driver refused"
    NOTHING_ASKED = "nothing was asked"


_REMEDIES = {
    HintSkip.ENDED: "no CUDA call can be made here; start workers with 'spawn' or 'forkserver'",
    HintSkip.FOREIGN: "it is not wholly in one live block of the bridge; make it while the bridge is installed",
    HintSkip.HOST: "it is on the CPU for good; nothing moves, so nothing need be asked",
    HintSkip.NOT_MANAGED: "only managed memory moves; install(backend='managed', ...)",
    HintSkip.NO_CONCURRENT_ACCESS: "the device moves whole allocations at kernel launches, and takes no hints",
    HintSkip.CAPTURING: "a hint would be replayed with the graph; give it before the capture begins",
    HintSkip.BAD_STREAM: "the driver does not know it; it may have been destroyed",
    HintSkip.LARGER_THAN_DEVICE: "the end would push out the beginning; prefetch it in pieces as they are used",
    HintSkip.LESS_THAN_A_PAGE: "only whole pages can be discarded, so that nobody else's bytes are lost",
    HintSkip.HOLES: "the bytes between its elements belong to another array; discard the array that has them all",
    HintSkip.UNORDERED: "discarding is only safe after the last use",
    HintSkip.NO_LIBRARY: "pip install 'rmm-managed-bridge[hints]'",
    HintSkip.NOTHING_ASKED: "pass an array, and for advise() at least one of its arguments",
}


@dataclass(frozen=True)
class HintResult:
    """What became of a hint. True in a condition if it was given to the driver for all that was named.

    Done means that the driver took the call, not that pages have moved: a prefetch moves them in the order of its
    stream, and advice acts when they are next touched.

    Examples
    --------
    >>> done = bridge.prefetch(np.ones(1 << 20), "cpu")
    >>> if not done:
    ...     print(done)
    prefetch skipped: host memory (it is on the CPU for good; nothing moves, so nothing need be asked)
    """

    action: str
    """``"prefetch"``, ``"advise"`` or ``"discard"``."""
    done: bool
    reason: HintSkip | None = None
    """Why it was skipped; for a list, the first reason."""
    ptr: int = 0
    size_bytes: int = 0
    """The range that the driver was given, in whole pages; for a list, the sum of bytes from the first address."""
    sharing_count: int = 0
    """How many other live blocks have bytes on the first or the last of these pages. They feel the hint too."""
    detail: str = ""
    """More, where there is more to say, in the driver's words for instance."""
    parts: tuple["HintResult", ...] = ()
    """For a list: one result for each, in order."""

    def __bool__(self) -> bool:
        return self.done

    def __str__(self) -> str:
        if self.reason is None:
            shared = f", pages shared with {self.sharing_count} other blocks" if self.sharing_count else ""
            return f"{self.action} of {format_bytes(self.size_bytes)} done{shared}"
        more = self.detail or _REMEDIES.get(self.reason, "")
        return f"{self.action} skipped: {self.reason}{f' ({more})' if more else ''}"


@dataclass(frozen=True)
class Residency:
    """Where pages of an array are wanted: what the bridge last asked for, and what the driver says.

    The driver's answers are for the whole range: None, False or nothing where its pages differ. They tell what was
    asked for, never where pages are at this moment; the driver does not say that.

    Examples
    --------
    >>> where = bridge.residency(np.ones(1 << 20))
    >>> where.asked, str(where.reason)
    (None, 'host memory')
    """

    asked: str | None
    """Where the bridge last prefetched any of the block to: ``"cpu"``, ``"cuda:0"``; None if it never did."""
    last_prefetch: str | None = None
    read_mostly: bool = False
    preferred_location: str | None = None
    accessed_by: tuple[str, ...] = ()
    reason: HintSkip | None = None
    """Why the driver could not be asked."""

    def __str__(self) -> str:
        if self.reason is not None:
            remedy = _REMEDIES.get(self.reason, "")
            return f"residency not known: {self.reason}{f' ({remedy})' if remedy else ''}"
        return (
            f"asked for {self.asked or 'nothing'}; the driver says: last prefetch {self.last_prefetch or 'none'}, "
            f"preferred {self.preferred_location or 'none'}, accessed by {', '.join(self.accessed_by) or 'none'}"
            + (", read mostly" if self.read_mostly else "")
        )
