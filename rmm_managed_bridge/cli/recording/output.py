"""The file that a verb writes."""

from pathlib import Path
from typing import IO

from rmm_managed_bridge.errors import BridgeError


def new_file(path: Path, *, force: bool) -> IO[bytes]:
    """Open a file for writing that does not exist, or with `force` one that does."""
    try:
        return path.open("wb" if force else "xb")
    except FileExistsError:
        raise BridgeError(f"{path} exists; name another file, or write over it with --force") from None
    except OSError as error:
        raise BridgeError(f"cannot write {path}: {error.strerror}") from None
