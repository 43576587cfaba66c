"""What native code cannot say itself: exceptions for what it refuses, and warnings where nothing could be raised."""

import atexit
import contextlib
import os
import sys
import warnings

from rmm_managed_bridge._native import pressure
from rmm_managed_bridge._native.recorded import as_recorded
from rmm_managed_bridge.errors import BackendError, BridgeError, BridgeWarning, ForeignPointerError
from rmm_managed_bridge.records import Event, Holder, Usage
from rmm_managed_bridge.units import format_bytes

_NO_LIMIT = 1 << 63


def forked_or_exiting(phase: str, requested_bytes: int) -> BackendError:
    """The error for an allocation in a process that must not make any."""
    size = format_bytes(requested_bytes)
    if phase == "forked":
        return BackendError(
            f"no memory for {size}: this process was forked after the pool was made; start workers with the 'spawn' or "
            "'forkserver' method, or call rmm_managed_bridge.install('host') in the worker for host memory"
        )
    return BackendError(f"no memory for {size}: the interpreter is shutting down")


def capturing(requested_bytes: int, stream: int) -> BridgeError:
    """The error for an allocation on a stream that is being captured."""
    return BridgeError(
        f"{format_bytes(requested_bytes)} cannot be allocated on stream {stream:#x} while it is being captured: "
        "allocate before the capture begins and use the array inside it"
    )


def bad_stream(stream: int) -> BridgeError:
    """The error for a stream that the driver does not take."""
    return BridgeError(f"stream {stream:#x} is not a stream of this device; it may have been destroyed")


def other_device(stream: int, theirs: int, ours: int) -> BridgeError:
    """The error for a stream of another device than the pool's."""
    return BridgeError(
        f"stream {stream:#x} is a stream of device {theirs}, and this pool is that of device {ours}; allocate from the "
        f"pool of device {theirs}, as install(devices=[{ours}, {theirs}]) makes one, or on a stream of device {ours}"
    )


def closed(requested_bytes: int) -> BackendError:
    """The error for an allocation from a pool that has ended."""
    return BackendError(
        f"no memory for {format_bytes(requested_bytes)}: this pool was closed by uninstall() or rmm.reinitialize(); "
        "call rmm_managed_bridge.install() again, or use the resource that is current now"
    )


def out_of_memory(
    holders: list[tuple[Holder, Usage, int, int]],
    requested_bytes: int,
    live_bytes: int,
    reserved_bytes: int,
    quarantined_bytes: int,
    largest_free_bytes: int,
    limit_bytes: int,
    refused: str,
) -> MemoryError:
    """The error for an allocation that neither pool nor upstream can serve: who refused it, and who holds the most."""
    limit = f" of at most {format_bytes(limit_bytes)}" if limit_bytes < _NO_LIMIT else ""
    lines = [
        f"cannot allocate {format_bytes(requested_bytes)}: {format_bytes(live_bytes)} live, "
        f"{format_bytes(reserved_bytes)}{limit} reserved, largest free piece "
        f"{format_bytes(largest_free_bytes)}, {format_bytes(quarantined_bytes)} waiting for device work; {refused}"
    ]
    holding = [holder for holder, _, _, _ in holders if holder.current_bytes]
    lines.extend(f"  {as_recorded(holder)}" for holder in sorted(holding, key=lambda holder: -holder.current_bytes)[:5])
    return _with_callback_error(MemoryError("\n".join(lines)))


def who_refused(upstream: str, by_pool: bool, by_default: bool, limit_bytes: int | None, limited_by: str) -> str:
    """Say who has no memory left: the pool, by a limit that is the default or not, or else what it stands on.

    `limit_bytes`, `limited_by`: what the process may have by its control groups or `ulimit`, if that is less.
    """
    limit = "" if limit_bytes is None else f"{limited_by} ({format_bytes(limit_bytes)})"
    if by_pool and not by_default:
        return "refused by the limit of the pool, maximum_pool_size"
    if by_pool:
        return f"refused by the limit of the pool, which is the memory there is{limit and ', by the word of ' + limit}"
    return f"refused by {upstream}{limit and '; this process is limited by ' + limit}"


def timed_out(requested_bytes: int, stream: int, ptr: int, waiting_bytes: int, reserved_bytes: int) -> MemoryError:
    """The error for an allocation that waited for freed blocks as long as it may, in vain."""
    reserved, waiting = format_bytes(reserved_bytes), format_bytes(waiting_bytes)
    return MemoryError(
        f"cannot allocate {format_bytes(requested_bytes)}: {reserved} reserved, and no device work that freed memory "
        f"waits for has ended for as long as wait_timeout allows; the oldest is on stream {stream:#x}, before the "
        f"block at {ptr:#x} ({waiting} freed there): look for a kernel or a host function that hangs, or raise "
        "maximum_pool_size"
    )


def in_host_function(requested_bytes: int) -> MemoryError:
    """The error for an allocation inside a CUDA host function that nothing ready can serve."""
    return MemoryError(
        f"cannot allocate {format_bytes(requested_bytes)} inside a CUDA host function: nothing of that size is "
        "free, and nothing may be waited for or taken there; allocate before it is enqueued"
    )


def over_budget(requested_bytes: int, budgets: list[tuple[str, int, int]]) -> MemoryError:
    """The error for an allocation that would pass a tag's limit. `budgets`: (tag, limit, live), innermost first."""
    size = format_bytes(requested_bytes)
    passed = [budget for budget in budgets if budget[2] + requested_bytes > budget[1]] or budgets
    told = "; ".join(
        f"tag {tag!r} has {format_bytes(live)} live of {format_bytes(limit)}" for tag, limit, live in passed
    )
    return _with_callback_error(
        MemoryError(f"cannot allocate {size}: {told}; free some of it, or raise the limit of tag(..., limit=...)")
    )


def _with_callback_error(error: MemoryError) -> MemoryError:
    if (raised := pressure.callback_error()) is not None:
        error.add_note(f"on_oom raised {type(raised).__name__}: {raised}")
    return error


def foreign(ptr: int) -> ForeignPointerError:
    """The error for freeing what lies outside every pool."""
    return ForeignPointerError(
        f"{ptr:#x} was not allocated by the bridge; nothing was freed. Free it where it came from"
    )


def not_live(ptr: int) -> ForeignPointerError:
    """The error for freeing what is not the start of a live block."""
    return ForeignPointerError(
        f"{ptr:#x} is not the start of a live block: it was freed before, or points into one; nothing was freed"
    )


def unheld_stream(ptr: int) -> BridgeError:
    """The error for waiting for work on a stream that nobody can ask."""
    return BridgeError(
        f"the memory at {ptr:#x} was used on a stream that is known as a bare handle only, so its work cannot be "
        "waited for; pass the stream object to record_stream(x, stream) first"
    )


_DAMAGE = {
    "written_before": "was written in front of its start",
    "written_behind": "was written past its end",
    "written_after_free": "was written after it was freed",
}


_unheard = False


def warn(pending: list[tuple[str, int, int, Event]], *, heard: bool = False) -> None:
    """Warn of what came up where nothing could be raised: (kind, bytes, offset, event) of each.

    Where warnings are errors, the first is raised. `heard`: somebody in Python has called, and will get it. Else it
    ends in "Exception ignored", since native code called, and the process ends with an exit code that says so.
    """
    global _unheard
    raised: Warning | None = None
    for kind, size_bytes, offset, event in pending:
        try:
            warnings.warn(BridgeWarning(_text(kind, size_bytes, offset, event)), stacklevel=2)
        except Warning as error:
            raised = raised or error
    if raised is not None:
        _unheard = _unheard or not heard
        raise raised


def _end_in_failure() -> None:
    """Python has no way to change the exit code in `atexit`, so this is the end: registered early, it runs late."""
    if _unheard:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


atexit.register(_end_in_failure)


def _text(kind: str, size_bytes: int, offset: int, event: Event) -> str:
    if kind == "quarantine_full":
        return (
            f"{format_bytes(size_bytes)} of freed memory wait for device work that has not ended, more than "
            "maximum_quarantine_size allows; the pool takes more memory instead: look for a kernel that hangs, or "
            "synchronize the stream now and then"
        )
    event = as_recorded(event)
    tag = f', tag "{event.tag}"' if event.tag else ""
    return (
        f"memory is corrupt: the block of {size_bytes} bytes at {event.ptr:#x} ({event.framework}{tag}, {event.site}) "
        f"{_DAMAGE[kind]}, first at byte {offset}"
    )
