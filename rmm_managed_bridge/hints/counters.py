"""How many hints were given and skipped in this process, for `bridge.stats()`."""

import os
import threading
from collections import Counter

from rmm_managed_bridge._native import hint_table
from rmm_managed_bridge.hints.results import HintResult, HintSkip

_lock = threading.Lock()
_done: Counter[str] = Counter()
_skipped: Counter[str] = Counter()


def count(result: HintResult) -> None:
    """Count one array's result: under its action if it was done, else under the reason."""
    with _lock:
        if result.reason is None:
            _done[result.action] += 1
        else:
            _skipped[str(result.reason)] += 1


def counts() -> tuple[dict[str, int], dict[str, int]]:
    """Return what was done, by action, and what was skipped, by reason, in native code too."""
    with _lock:
        for outcome, number in hint_table.take_new_block_counts().items():
            if outcome == "DONE":
                _done["prefetch"] += number
            else:
                _skipped[str(HintSkip[outcome])] += number
        return dict(_done), dict(_skipped)


def _forget_lock() -> None:
    """In a forked child: a thread that held the lock is not there to let it go."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
