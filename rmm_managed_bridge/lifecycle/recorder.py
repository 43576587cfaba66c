"""A file of this process's allocations that is whole at every moment. Its format is in docs/design/recording.md."""

import atexit
import os
import platform
import re
import sys
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rmm_managed_bridge._native import recording as native_recording
from rmm_managed_bridge.errors import BridgeError, ConfigError, shown
from rmm_managed_bridge.units import format_bytes, parse_bytes

__all__ = ["OWNER_VARIABLE", "VARIABLE", "Recording", "expanded", "record", "record_if_asked"]

VARIABLE = "RMM_BRIDGE_RECORD"
SIZE_VARIABLE = "RMM_BRIDGE_RECORD_SIZE"
OWNER_VARIABLE = "RMM_BRIDGE_RECORD_OWNER"
"""Set by the process that records because of `VARIABLE`, for those that it starts."""

_HEADER_BYTES = 4096
_PLACE_BYTES = 64  # of an event, and of a live block
_HOLDER_BYTES = 2 * 8192 * 32
_CHUNK = 1024  # places for live blocks that are given out together
_LEAST_BYTES = 4 << 20
_MOST_BYTES = 1 << 40
_DEFAULT_SIZE = "128MiB"

_lock = threading.RLock()
_current: "Recording | None" = None
_at_exit = False


def _leave_to_parent() -> None:
    """In a forked child: the file is its parent's, and so is the lock of a thread that the child does not have."""
    global _lock, _current
    _lock = threading.RLock()
    _current = None


os.register_at_fork(after_in_child=_leave_to_parent)


class Recording:
    """What `record` has started. It ends with `stop`, with the ``with`` block, or with the process, however that ends.

    Attributes
    ----------
    path : pathlib.Path
        The file, with what ``%p`` and ``%h`` came to.

    Examples
    --------
    >>> with bridge.record("%h-%p.rec", size="4MiB") as recording:
    ...     x = np.ones(1 << 20)
    >>> recording.path.exists(), recording.active
    (True, False)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()

    @property
    def active(self) -> bool:
        """Whether events of this process go to the file."""
        return _current is self

    def stop(self) -> None:
        """Write the last figures and end the recording. Does nothing a second time, and in a forked child."""
        global _current
        with _lock:
            if _current is self and self._pid == os.getpid():
                native_recording.stop()
                _current = None

    close = stop

    def __enter__(self) -> Self:
        if not self.active:
            raise BridgeError(f"the recording {self.path} has ended; call record() again, with another file")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Recording: {self.path}, {'active' if self.active else 'ended'}>"


def record(path: str | os.PathLike[str], *, size: int | str = _DEFAULT_SIZE) -> Recording:
    """Record every allocation and free of this process into a file, from now on.

    The file is whole at every moment: after SIGKILL, a segmentation fault or the kernel's out-of-memory killer it still
    tells who held what. It holds the newest events, half a million for each 64 MiB of `size`, and each block that is
    alive. ``rmm-bridge`` reads it, also while it is written.

    Costs 40 to 60 ns an event, and 20 to 60 ms at the start for each 128 MiB of `size`. May be called from any thread,
    and records all of them; a forked child does not go on with it. The frees that come after the interpreter's end has
    begun are not recorded.

    Parameters
    ----------
    path : str or os.PathLike
        A file that does not exist, in a folder that does. ``%p`` in it becomes the number of the process, ``%h`` the
        name of the host, ``%%`` a per cent sign. Only the owner may read the file: names of files and tags are in it.
    size : int or str
        How large the file is, from the start: bytes, or text such as ``"128MiB"``, at least 4 MiB.

    Returns
    -------
    Recording
        Usable in ``with``.

    Raises
    ------
    BridgeError
        If the file exists, cannot be made or cannot be given all of its memory, or if this process records already.
    ConfigError
        If `path` or `size` is of no use.

    Examples
    --------
    >>> recording = bridge.record("program-%p.rec", size="4MiB")
    >>> x = np.ones(1 << 20)
    >>> recording.stop()
    """
    global _current, _at_exit
    with _lock:
        if _current is not None:
            raise BridgeError(f"this process records into {_current.path} already; stop() that first")
        file_path = expanded(path, os.getpid())
        event_count, block_count, text_bytes = _shape(size)
        file_bytes = _HEADER_BYTES + (event_count + block_count) * _PLACE_BYTES + _HOLDER_BYTES + text_bytes
        file = _create(file_path, file_bytes)
        try:
            native_recording.start(file, event_count, block_count, text_bytes, _about())
        except OSError as error:
            file_path.unlink()
            raise BridgeError(f"cannot record into {file_path}: it cannot be mapped ({error.strerror})") from None
        except BaseException:
            file_path.unlink()
            raise
        finally:
            os.close(file)
        _current = Recording(file_path)
        if not _at_exit:
            atexit.register(_stop_current)
            _at_exit = True
        return _current


def record_if_asked(environment: MutableMapping[str, str] = os.environ) -> Recording | None:
    """Start what ``RMM_BRIDGE_RECORD`` asks for, once in a process. One that inherits it adds its number to the name.

    Raises
    ------
    BridgeError
        As `record`.
    """
    path = environment.get(VARIABLE, "")
    with _lock:
        if not path or _current is not None or environment.get(OWNER_VARIABLE) == str(os.getpid()):
            return None
        if environment.get(OWNER_VARIABLE, "") and "%p" not in path.replace("%%", ""):
            path += ".%p"
        size = environment.get(SIZE_VARIABLE) or _DEFAULT_SIZE
        try:
            recording = record(path, size=size)
        except BridgeError as error:
            raise type(error)(f"{VARIABLE}: {error}") from None
        environment[OWNER_VARIABLE] = str(os.getpid())
        return recording


def _stop_current() -> None:
    if (recording := _current) is not None:
        recording.stop()


def expanded(path: str | os.PathLike[str], pid: int) -> Path:
    """Return the file that the process `pid` records into when it is told `path`."""
    try:
        text: object = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f'path={shown(path)} is no name of a file; write record("program.rec")')

    def meant(found: re.Match[str]) -> str:
        return {"p": str(pid), "h": platform.node().replace("/", "_"), "%": "%"}.get(found[1], found[0])

    return Path(re.sub("%(.)", meant, text)).absolute()


def _shape(size: int | str) -> tuple[int, int, int]:
    """Return (places for events, places for blocks, bytes of text) of a file that is no larger than `size`."""
    size_bytes = parse_bytes(size, "size")
    if not _LEAST_BYTES <= size_bytes <= _MOST_BYTES:
        raise ConfigError(
            f"size={shown(size)}: a recording has {format_bytes(_LEAST_BYTES)} to {format_bytes(_MOST_BYTES)}"
        )
    text_bytes = size_bytes // 16 // 4096 * 4096
    event_count = 1 << ((size_bytes // 2 // _PLACE_BYTES).bit_length() - 1)
    left = size_bytes - _HEADER_BYTES - _HOLDER_BYTES - text_bytes - event_count * _PLACE_BYTES
    return event_count, left // (_CHUNK * _PLACE_BYTES) * _CHUNK, text_bytes


def _create(path: Path, size_bytes: int) -> int:
    """Make the file with all of its memory: a full disk would be SIGBUS inside an allocation."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BridgeError(
            f"cannot record into {path}: it exists, and is not overwritten; use another name, or %p in it for the "
            "number of the process"
        ) from None
    except OSError as error:
        raise BridgeError(f"cannot record into {path}: {error.strerror}; name a file that can be made") from None
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError as error:
        os.close(file)
        path.unlink()
        raise BridgeError(
            f"cannot record into {path}: no {format_bytes(size_bytes)} to be had there ({error.strerror}); name a file "
            "elsewhere, or give a smaller size"
        ) from None
    return file


def _about() -> Mapping[str, object]:
    return {
        "arguments": [str(argument) for argument in sys.argv],
        "python": platform.python_version(),
        "host": platform.node(),
        "folder": _folder(),
    }


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it is gone
        return ""
