"""What the CUDA driver says about itself and its devices, asked without any framework and without a context."""

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DriverFacts", "describe_driver"]

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_KERNEL_MODULE_VERSION = Path("/sys/module/nvidia/version")
_NAME_BYTES = 256


@dataclass(frozen=True)
class DriverFacts:
    """The CUDA driver and its devices, or why there are none."""

    available: bool
    summary: str
    devices: tuple[str, ...] = ()


def describe_driver(library: str = _LIBRARY) -> DriverFacts:
    """Ask the driver in `library` for its version and its devices; absence is an answer, not an error."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return DriverFacts(available=False, summary=f"none: {error}")
    code = driver.cuInit(0)
    if code != 0:
        return DriverFacts(available=False, summary=f"{library} is there, but cuInit fails with {_error(driver, code)}")
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    summary = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if _KERNEL_MODULE_VERSION.exists():
        summary = f"{_KERNEL_MODULE_VERSION.read_text().strip()}, {summary}"
    return DriverFacts(
        available=count.value > 0,
        summary=summary,
        devices=tuple(f"cuda:{ordinal} {_device_name(driver, ordinal)}" for ordinal in range(count.value)),
    )


def _device_name(driver: ctypes.CDLL, ordinal: int) -> str:
    handle = ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    code = driver.cuDeviceGet(ctypes.byref(handle), ordinal) or driver.cuDeviceGetName(name, _NAME_BYTES, handle)
    return name.value.decode() if code == 0 else f"(no name: {_error(driver, code)})"


def _error(driver: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {code}"
