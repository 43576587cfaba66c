"""What this machine and its devices have and can do, and what follows: the backend, and advice on huge pages."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.units import format_bytes

# Numbers of CUdevice_attribute, from cuda.h.
_UNIFIED_ADDRESSING = 41
_MANAGED_MEMORY = 83
_CONCURRENT_MANAGED_ACCESS = 89
_PAGEABLE_MEMORY_ACCESS = 88
_HOST_PAGE_TABLES = 100

_HUGEPAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Traits(NamedTuple):
    """What one device can do, as its driver says."""

    device: int
    managed_memory: bool
    concurrent_managed_access: bool
    """CPU and GPU may work on managed memory at the same time; without it the CPU must wait for the whole device."""
    pageable_memory_access: bool
    """Kernels may use memory from `malloc` (HMM or ATS)."""
    host_page_tables: bool
    """The device walks the CPU's page tables (ATS), as Grace Hopper does."""
    unified_addressing: bool
    """Kernels may use pinned host memory at the address that the CPU has for it."""


class Memory(NamedTuple):
    """What there is of host memory."""

    machine_bytes: int
    allowed_bytes: int
    """What this process may have of it."""
    limited_by: str
    """The file of a control group, or ``"ulimit -v"``; empty where the machine is the limit."""

    def __str__(self) -> str:
        limit = f", of which this process may have {format_bytes(self.allowed_bytes)} ({self.limited_by})"
        return format_bytes(self.machine_bytes) + (limit if self.limited_by else "")


def host_memory() -> Memory:
    """Return what this process may have of the machine's memory, as its control groups and `ulimit` are now."""
    machine_bytes, allowed_bytes = native_process.memory_bytes(-1), native_process.allowed_bytes()
    limited_by = native_process.memory_limit()[1] if allowed_bytes < machine_bytes else ""
    return Memory(machine_bytes, allowed_bytes, limited_by)


def load_driver() -> tuple[int, str]:
    """Return the number of CUDA devices and, where there is none, why. Makes no context."""
    return native_process.load_driver(os.environ.get("RMM_BRIDGE_DRIVER_LIBRARY", "libcuda.so.1"))


@functools.cache
def device_traits(device: int) -> Traits:
    """Return what `device` can do."""
    return Traits(
        device,
        *(
            bool(native_process.device_attribute(device, attribute))
            for attribute in (
                _MANAGED_MEMORY,
                _CONCURRENT_MANAGED_ACCESS,
                _PAGEABLE_MEMORY_ACCESS,
                _HOST_PAGE_TABLES,
                _UNIFIED_ADDRESSING,
            )
        ),
    )


def detect_backend(devices: Sequence[int] | Literal["all"] | None = None) -> tuple[str, str]:
    """Return the backend that ``install(backend="auto", devices=devices)`` takes on this machine, and why.

    Of several devices the least able one decides. Never an error: one that is not there can do nothing.

    Parameters
    ----------
    devices : sequence of int or "all", optional
        Device 0 by default.

    Returns
    -------
    backend, reason : str

    Examples
    --------
    >>> backend, why = bridge.detect_backend()
    >>> backend in ("managed", "host")
    True
    """
    count, why_not = load_driver()
    if count == 0:
        return "host", why_not
    for device in range(count) if devices == "all" else devices or (0,):
        if not device_traits(device).managed_memory:
            return "host", f"device {device} does not support managed memory"
    return "managed", "the device supports managed memory"


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
        return "[madvise]" in _HUGEPAGES_SETTING.read_text(encoding="ascii")
    except OSError:
        return False
