"""What a forked child finds of arrays in managed memory: copies from before the fork, a warning, or an error.

docs/design/fork.md has the reasons. Only forks that Python makes are seen here: those of C have nothing copied.
"""

import contextlib
import os
import sys
import warnings
from pathlib import Path

from rmm_managed_bridge._native import ledger
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.errors import BridgeError, BridgeWarning
from rmm_managed_bridge.units import format_bytes

LARGEST_LIMIT_BYTES = 4 << 30
PATIENCE_MS = 1000
KEEP_MS = 5000

_STARTERS = ("asyncio", "concurrent", "multiprocessing", "os", "pty", "subprocess")
"""Modules of the standard library that fork for their callers."""
_SPAWN = "start workers with the 'spawn' or 'forkserver' method"
_WHY_LEFT_OUT = {
    "not finished": "device work on it has not ended within a second; wait for it before the fork",
    "capturing": "a stream that is being captured uses it; end the capture before the fork",
    "unheld stream": "it is used on a stream whose object the bridge does not hold; pass the stream's object to views",
    "driver": "the CUDA driver failed while it was copied",
    "exclusive": f"its device does not share memory with the CPU while it is busy; {_SPAWN}",
}
_mode = "copy"
_limit_bytes: int | None = None
_registered = _audited = _warned = False


def watch(mode: str | None = None, limit_bytes: int | None = None) -> None:
    """Look after forks from now on, for good; as `install` was told, else as before."""
    global _mode, _limit_bytes, _registered, _audited
    if mode is not None:
        _mode, _limit_bytes = mode, limit_bytes
    if not _registered:
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
        _registered = True
    if _mode == "refuse" and not _audited:
        # A hook of `register_at_fork` cannot refuse: Python prints what it raises, and forks.
        sys.addaudithook(_refuse)
        _audited = True


def default_limit_bytes() -> int:
    """Return the least of 4 GiB and a quarter of what this machine, and the group of this process, has free."""
    free = native_process.memory_bytes(-1)
    with contextlib.suppress(OSError, ValueError):
        line = next(each for each in Path("/proc/meminfo").read_text().splitlines() if each.startswith("MemAvailable:"))
        free = int(line.split()[1]) << 10
    limit, file = native_process.memory_limit()
    usage = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}.get(Path(file).name)
    if limit is not None and usage is not None:
        with contextlib.suppress(OSError, ValueError):
            free = min(free, max(limit - int(Path(file).with_name(usage).read_text()), 0))
    return min(LARGEST_LIMIT_BYTES, free // 4)


def _before_fork() -> None:
    if native_process.phase() != "running" or all(pool.kind != "managed" for pool in native_pool.pools()):
        return
    # With `preexec_fn`. It runs another program at once, and reads nothing of this one.
    if (caller := sys._getframe().f_back) is not None and caller.f_globals.get("__name__") == "subprocess":
        return
    if _mode == "warn":
        count, size_bytes = _managed_arrays()
        if count:
            _warn_once(f"fork with {count} NumPy arrays ({format_bytes(size_bytes)}) in managed memory", _SPAWN)
    elif _mode == "copy":
        _copy()


def _after_fork() -> None:
    native_process.end_fork(KEEP_MS)


def _copy() -> None:
    limit = default_limit_bytes() if _limit_bytes is None else _limit_bytes
    outcome, count, size_bytes, _, left_out, left_out_bytes, first, why = native_process.copy_for_fork(
        limit, PATIENCE_MS
    )
    what = f"fork with {count} arrays ({format_bytes(size_bytes)}) in managed memory that the CPU uses"
    if outcome == "too large":
        cure = f"allow more, install(fork_limit='{-(-size_bytes >> 20)}MiB') say, or {_SPAWN}"
        _warn_once(f"{what}, more than fork_limit ({format_bytes(limit)})", cure)
    elif outcome == "no memory":
        _warn_once(f"{what}, and no memory to copy them to", f"make room, or {_SPAWN}")
    elif outcome == "busy":
        _warn_once(
            f"{what}, and another thread takes too long to fork or to give memory back", f"try again, or {_SPAWN}"
        )
    elif left_out:
        _warn(
            f"fork without {left_out} arrays ({format_bytes(left_out_bytes)}) in managed memory, which a child must "
            f"not read; of the first, at {first:#x}: {_WHY_LEFT_OUT[why]}"
        )


def _refuse(event: str, _: object) -> None:
    if event not in ("os.fork", "os.forkpty") or _mode != "refuse" or native_process.phase() != "running":
        return
    count, size_bytes = _managed_arrays()
    if count:
        raise BridgeError(
            f"fork with {count} NumPy arrays ({format_bytes(size_bytes)}) in managed memory, which "
            f"install(fork='refuse') does not allow: {_SPAWN}, or drop the arrays before"
        )


def _managed_arrays() -> tuple[int, int]:
    count = size_bytes = 0
    for holder, _, _, _ in ledger.holders():
        if holder.framework == "numpy" and holder.kind == "managed":
            count += holder.current_count
            size_bytes += holder.current_bytes
    for pool in native_pool.pools():
        if pool.track == "off" and pool.kind == "managed":  # whose blocks are, nobody knows
            count += pool.live_count
            size_bytes += pool.live_bytes
    return count, size_bytes


def _warn_once(what: str, cure: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        _warn(f"{what}: a child that reads one of them dies with SIGSEGV; {cure}")


def _warn(text: str) -> None:
    warnings.warn(BridgeWarning(text), stacklevel=_level_of_the_user())


def _level_of_the_user() -> int:
    """Return the `stacklevel` for `_warn` of the line that forks, or that had the standard library do so."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        __name__.partition(".")[0],
        *_STARTERS,
    ):
        frame = frame.f_back
        level += 1
    return level
