"""One warning, in the parent, before a fork that leaves NumPy arrays in managed memory to a child."""

import os
import sys
import warnings

from rmm_managed_bridge._native import ledger
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.errors import BridgeWarning
from rmm_managed_bridge.units import format_bytes

_STARTERS = ("asyncio", "concurrent", "multiprocessing", "os", "pty", "subprocess")
"""Modules of the standard library that fork for their callers."""
_registered = False
_warned = False


def warn_before_forks() -> None:
    """Watch for forks from now on. Only forks that Python makes are seen; the pool itself sees all."""
    global _registered
    if not _registered:
        os.register_at_fork(before=_before_fork)
        _registered = True


def _before_fork() -> None:
    global _warned
    if _warned or native_process.phase() != "running":
        return
    count = size_bytes = 0
    for holder, _, _, _ in ledger.holders():
        if holder.framework == "numpy" and holder.kind == "managed":
            count += holder.current_count
            size_bytes += holder.current_bytes
    for pool in native_pool.pools():
        if pool.track == "off" and pool.kind == "managed":  # whose blocks are, nobody knows
            count += pool.live_count
            size_bytes += pool.live_bytes
    if count == 0:
        return
    _warned = True
    warnings.warn(
        BridgeWarning(
            f"fork with {count} NumPy arrays ({format_bytes(size_bytes)}) in managed memory: a child that reads one of "
            "them dies with SIGSEGV, and nothing can prevent it; start workers with the 'spawn' or 'forkserver' method"
        ),
        stacklevel=_level_of_the_user(),
    )


def _level_of_the_user() -> int:
    """Return the `stacklevel` of the line that forks, or that had the standard library do so."""
    level = 2  # the caller of the hook: a C function has no frame
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _STARTERS:
        frame = frame.f_back
        level += 1
    return level
