"""Which hints the bridge gives by itself for a block: of the context, else of the block's tag, else of `install`."""

import threading
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

from rmm_managed_bridge._native import hint_table, ledger
from rmm_managed_bridge.config import Hints
from rmm_managed_bridge.errors import ConfigError

# The hints and what was there before: what to go back to is kept with the context, so that tasks and threads may share
# one `using_hints` object.
_Link = tuple[Hints, Any]
_context: ContextVar[_Link | None] = ContextVar("rmm_managed_bridge.hints", default=None)
_of_tag: dict[str, Hints] = {}
_installed = Hints.none
_noted_bytes: int | None = None  # of contexts and tags
_least_bytes: int | None = None  # of these and of `install`
_lock = threading.Lock()
_ever = False  # whether any hints were ever asked for


def in_use() -> bool:
    """Return False as long as nobody has asked for hints of any kind: most programs never do."""
    return _ever


class using_hints:  # noqa: N801 - used like a function: `with bridge.using_hints("device"):`
    """Use these hints inside the block, in this context: before those of tags and of `install`.

    Follows `contextvars`, as `tag` does: a task inherits them, a new thread starts with those of `install`.

    Parameters
    ----------
    hints : Hints or str
        ``Hints.device``, ``Hints("device", min_bytes="16MiB")``, ``"device"`` or ``"device:16MiB"``.

    Raises
    ------
    ConfigError
        If they are not hints, or say something of huge pages.

    Notes
    -----
    New blocks of RMM and PyTorch are made without the GIL, where no context is seen: for them only `install` counts.

    Examples
    --------
    >>> field = np.ones(1 << 20, np.float32)
    >>> with bridge.using_hints("host"):  # on a GPU, what is handed over in here stays with the CPU
    ...     total = bridge.as_numpy(field).sum()
    """

    __slots__ = ("_hints",)

    def __init__(self, hints: Hints | str) -> None:
        self._hints = placement_hints(hints)

    def __enter__(self) -> Self:
        _note(self._hints)
        _context.set((self._hints, _context.get()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        link = _context.get()
        _context.set(None if link is None else link[1])

    def __repr__(self) -> str:
        return f"using_hints({self._hints!r})"


def placement_hints(hints: Hints | str) -> Hints:
    """Return the hints of a context or a tag.

    Raises
    ------
    ConfigError
        If they are not hints, or say something of huge pages: that advice is for memory which goes from block to block.
    """
    found = Hints.read(hints)
    if found.hugepages is not None:
        raise ConfigError(
            f"{found!r}: a context or a tag cannot choose hugepages, since the advice is for memory of the pool, which "
            "goes from block to block, whatever their contexts and tags; say it in install(hints=...) or "
            "install(hugepages=...)"
        )
    return found


def set_installed(hints: Hints) -> None:
    """Set what counts where neither the context nor a tag says otherwise.

    It is all that counts for new blocks of RMM and PyTorch: they are made without the GIL, where no context is seen.
    """
    global _installed, _ever
    _installed = hints
    _ever = _ever or hints.placement != "none"
    _tell_least()
    hint_table.prefetch_new_blocks(hints.min_bytes if hints.placement == "device" else None)


def set_of_tag(tag: str, hints: Hints) -> None:
    """Set the hints of blocks with this tag and with tags inside it. The last ones count."""
    _of_tag[tag] = hints
    _note(hints)


def hints_for(ptr: int) -> Hints:
    """Return the hints for the live block at `ptr`, as seen from this context."""
    link = _context.get()
    if link is not None:
        return link[0]
    if _of_tag:
        allocation = ledger.allocation_of(ptr)
        tag = "" if allocation is None else allocation.tag
        while tag:
            found = _of_tag.get(tag)
            if found is not None:
                return found
            tag = tag.rpartition("/")[0]
    return _installed


def wants_to_know(size_bytes: int) -> bool:
    """Return False for new blocks that no hints in use can be about."""
    return _least_bytes is not None and size_bytes >= _least_bytes


def _note(hints: Hints) -> None:
    """Let the native entry points report blocks from this size on: for the life of the process, as tags stay."""
    global _noted_bytes, _ever
    _ever = True
    if hints.placement == "device":
        with _lock:
            _noted_bytes = min(hints.min_bytes, hints.min_bytes if _noted_bytes is None else _noted_bytes)
        _tell_least()


def _tell_least() -> None:
    global _least_bytes
    with _lock:
        sizes = [] if _noted_bytes is None else [_noted_bytes]
        if _installed.placement == "device":
            sizes.append(_installed.min_bytes)
        _least_bytes = min(sizes, default=None)
        hint_table.set_least_bytes(_least_bytes)
