"""Whether host memory is advised to use huge pages."""

import os
from pathlib import Path

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advise_hugepages() -> bool:
    """Return True if slabs should be advised: where the kernel leaves it to the program, and NumPy's switch is not off.

    With the kernel's setting "always" advice is not needed, with "never" it does nothing.
    ``NUMPY_MADVISE_HUGEPAGE=0`` turns it off, as it does for NumPy's own memory.
    """
    if os.environ.get("NUMPY_MADVISE_HUGEPAGE", "1") == "0":
        return False
    try:
        return "[madvise]" in _SETTING.read_text(encoding="ascii")
    except OSError:
        return False
