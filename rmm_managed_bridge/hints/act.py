"""Giving hints on targets: checks before the driver is touched, notes for the block's end, and one result for each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rmm_managed_bridge import machine
from rmm_managed_bridge._native import blocks, hint_table
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge._native.hint_table import CPU, NOBODY, PREFERRED, READ_MOSTLY
from rmm_managed_bridge.arrays.stream_use import hold, note_use
from rmm_managed_bridge.errors import BridgeError, ConfigError
from rmm_managed_bridge.frameworks import registry
from rmm_managed_bridge.frameworks.streams import stream_handle
from rmm_managed_bridge.hints import driver, pages
from rmm_managed_bridge.hints.driver import DriverRefusedError, NoLibraryError, Range
from rmm_managed_bridge.hints.results import HintResult, HintSkip
from rmm_managed_bridge.hints.targets import Target, state_of, user_of


@dataclass(frozen=True)
class Advice:
    """What `advise` was asked for. Places are in a tuple of their own, so that None means that nothing was said."""

    read_mostly: bool | None = None
    preferred: tuple[tuple[int, ...]] | None = None
    accessed_by: tuple[tuple[int, ...]] | None = None


def skipped(action: str, target: Target, reason: HintSkip, detail: str = "") -> HintResult:
    """The result of a hint that was not given."""
    return HintResult(action, False, reason, target.ptr, 0, detail=detail)


def prefetch(targets: Sequence[Target], place: int, stream: int | None) -> list[HintResult]:
    """Move targets, those on one stream in one call of the driver. `stream`: None for that of each one's framework."""
    results: dict[int, HintResult] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    users: list[Any] = []  # keeps the streams alive until the calls are made
    for number, target in enumerate(targets):
        reason = target.refusal() or _why_not_to(place, target.size_bytes)
        handle = 0
        if reason is None:
            users.append(user_of(target) if stream is None else stream)
            handle = stream_handle(users[-1])
            reason = state_of(target, handle)
        if reason is None:
            groups.setdefault((target.device, handle), []).append(number)
        else:
            results[number] = skipped("prefetch", target, reason)
    for (_, handle), numbers in groups.items():
        ranges = [pages.outwards(targets[number].ptr, targets[number].size_bytes) for number in numbers]
        problem: tuple[HintSkip, str] | None = None
        try:
            with hint_table.driver_scope(targets[numbers[0]].ptr):
                driver.load().prefetch(ranges, place, handle)
        except (NoLibraryError, DriverRefusedError) as error:
            problem = _problem(error)
        for number, (low, high) in zip(numbers, ranges, strict=True):
            target = targets[number]
            if problem is not None:
                results[number] = skipped("prefetch", target, *problem)
            else:
                hint_table.place(target.ptr, place)
                sharing = hint_table.sharing(target.ptr, low, high)
                results[number] = HintResult("prefetch", True, None, low, high - low, sharing)
    return [results[number] for number in range(len(targets))]


def advise(target: Target, advice: Advice) -> HintResult:
    """Give advice on a target, or take it back."""
    reason = target.refusal()
    if reason is None and advice == Advice():
        reason = HintSkip.NOTHING_ASKED
    for asked in (advice.preferred, advice.accessed_by):
        for place in asked[0] if asked is not None and reason is None else ():
            reason = reason or _why_not_to(place, 0)
    if reason is not None:
        return skipped("advise", target, reason)
    low, high = pages.outwards(target.ptr, target.size_bytes)
    try:
        with hint_table.driver_scope(target.ptr):
            calls = driver.load()
            for name, place, bits, accessors in _steps(target, advice):
                if name.startswith("SET"):
                    hint_table.note(target.ptr, low, high, bits, accessors)  # first: it may be freed meanwhile
                    calls.advise((low, high), name, place)
                else:
                    calls.advise((low, high), name, place)
                    hint_table.take_back(target.ptr, low, high, bits, accessors)
    except (NoLibraryError, DriverRefusedError) as error:
        return skipped("advise", target, *_problem(error))
    return HintResult("advise", True, None, low, high - low, hint_table.sharing(target.ptr, low, high))


def discard(target: Target) -> HintResult:
    """Let go of the contents of a target's whole pages, between the work on it so far and the work to come."""
    reason = target.refusal()
    low, high = pages.inwards(target.ptr, target.size_bytes)
    if reason is None and not target.dense:
        reason = HintSkip.HOLES
    if reason is None and low == high:
        reason = HintSkip.LESS_THAN_A_PAGE
    user = registry.stream_of(target.source, target.device) if reason is None else None
    if reason is None and user is not None:
        reason = state_of(target, stream_handle(user))
    if reason is not None:
        return skipped("discard", target, reason)
    try:
        with hint_table.driver_scope(target.ptr):
            calls = driver.load()
            mine = _own_stream(target.device, calls)
        # A stream of our own, since the driver does not discard on the legacy one. It is noted on the block, so that
        # nobody gets the memory before the contents are gone: they would lose theirs.
        hold(target.ptr, mine)
        note_use(target.source, blocks.find(target.ptr))
        blocks.order(target.ptr, mine.ptr)
        with hint_table.driver_scope(target.ptr):
            calls.discard((low, high), mine.ptr)
    except (NoLibraryError, DriverRefusedError) as error:
        return skipped("discard", target, *_problem(error))
    except BridgeError as error:
        return skipped("discard", target, HintSkip.UNORDERED, str(error))
    try:
        if user is None:
            blocks.synchronize(target.ptr)
        else:
            blocks.order(target.ptr, stream_handle(user))
    except BridgeError as error:  # a capture has begun in between
        return HintResult("discard", False, HintSkip.UNORDERED, low, high - low, detail=f"discarded, but {error}")
    return HintResult("discard", True, None, low, high - low)


_own_streams: dict[int, driver.OwnStream] = {}


def _own_stream(device: int, calls: driver.HintDriver) -> driver.OwnStream:
    stream = _own_streams.get(device)
    if stream is None:
        stream = _own_streams.setdefault(device, calls.new_stream())
    return stream


def _why_not_to(place: int, size_bytes: int) -> HintSkip | None:
    if place == CPU:
        return None
    count = native_process.load_driver()[0]
    if place >= count:
        raise ConfigError(f"device {place} does not exist; there are {count}")
    if not machine.device_traits(place).concurrent_managed_access:
        return HintSkip.NO_CONCURRENT_ACCESS
    return HintSkip.LARGER_THAN_DEVICE if size_bytes > native_process.memory_bytes(place) > 0 else None


def _steps(target: Target, advice: Advice) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """Yield (name, place, advice bits, accessors) of each call."""
    if advice.read_mostly is not None:
        yield ("SET" if advice.read_mostly else "UNSET") + "_READ_MOSTLY", CPU, READ_MOSTLY, NOBODY
    if advice.preferred is not None:
        places = advice.preferred[0]
        yield ("SET" if places else "UNSET") + "_PREFERRED_LOCATION", places[0] if places else CPU, PREFERRED, NOBODY
    if advice.accessed_by is not None:
        wanted = advice.accessed_by[0]
        noted = hint_table.hints_at(target.ptr)[3]
        # What others asked for is not known; without any note it is most likely the block's own device.
        gone = [place for place in noted if place not in wanted] or ([] if wanted else [target.device])
        for place in gone:
            yield "UNSET_ACCESSED_BY", place, 0, (place,)
        for place in wanted:
            yield "SET_ACCESSED_BY", place, 0, (place,)


def _problem(error: BridgeError) -> tuple[HintSkip, str]:
    return (HintSkip.NO_LIBRARY, "") if isinstance(error, NoLibraryError) else (HintSkip.REFUSED, str(error))


__all__ = ["Advice", "Range", "advise", "discard", "prefetch", "skipped"]
