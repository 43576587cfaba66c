"""Whether large blocks of host memory are advised to use huge pages."""

import os
from pathlib import Path

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advise_hugepages(mode: str) -> bool:
    """Return True if large blocks should be advised under ``install(hugepages=mode)``.

    ``"auto"`` does where the kernel leaves it to the program: with the kernel's setting "always" advice is not needed,
    with "never" it does nothing. ``NUMPY_MADVISE_HUGEPAGE=0`` turns that off, as it does for NumPy's own memory.
    """
    if mode != "auto":
        return mode == "always"
    if os.environ.get("NUMPY_MADVISE_HUGEPAGE", "1") == "0":
        return False
    try:
        return "[madvise]" in _SETTING.read_text(encoding="ascii")
    except OSError:
        return False
