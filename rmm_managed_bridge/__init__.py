"""One RMM managed-memory pool behind NumPy, CuPy, Warp and everything that uses RMM, which knows who holds it.

Importing this has no effect: no framework is imported and no GPU is touched before `install`.
"""

from typing import TYPE_CHECKING, Any

from rmm_managed_bridge.adapters.cupy import cupy_allocator
from rmm_managed_bridge.adapters.numpy import numpy_allocator
from rmm_managed_bridge.adapters.warp import WarpAllocator
from rmm_managed_bridge.errors import (
    BackendError,
    BridgeError,
    BridgeWarning,
    ConfigError,
    ForeignPointerError,
    FrameworkError,
    InstallError,
    ViewError,
)
from rmm_managed_bridge.exports import as_dlpack
from rmm_managed_bridge.install import Bridge, install, installed, uninstall
from rmm_managed_bridge.provenance import (
    allocation_of,
    history,
    peak_scope,
    record_events,
    reset_peak,
    snapshot,
    stats,
    status,
    synchronize,
    tag,
    trim,
)
from rmm_managed_bridge.records import Allocation, CallSite, Snapshot, Stats, Status
from rmm_managed_bridge.traits import detect_backend
from rmm_managed_bridge.views import as_cupy, as_numpy, as_warp, owns, record_stream

if TYPE_CHECKING:
    from rmm_managed_bridge.resource import ManagedBridgeResource

__version__ = "0.1.0"

warp_allocator = WarpAllocator()
"""For ``warp.set_cuda_allocator(bridge.warp_allocator)`` and its kin: serves each device from its newest pool."""

__all__ = [
    "Allocation",
    "BackendError",
    "Bridge",
    "BridgeError",
    "BridgeWarning",
    "CallSite",
    "ConfigError",
    "ForeignPointerError",
    "FrameworkError",
    "InstallError",
    "ManagedBridgeResource",
    "Snapshot",
    "Stats",
    "Status",
    "ViewError",
    "allocation_of",
    "as_cupy",
    "as_dlpack",
    "as_numpy",
    "as_warp",
    "cupy_allocator",
    "detect_backend",
    "history",
    "install",
    "installed",
    "numpy_allocator",
    "owns",
    "peak_scope",
    "record_events",
    "record_stream",
    "reset_peak",
    "snapshot",
    "stats",
    "status",
    "synchronize",
    "tag",
    "trim",
    "uninstall",
    "warp_allocator",
]


def __getattr__(name: str) -> Any:
    # RMM is imported with its resource class, and takes 0.3 s; the host backend does without.
    if name == "ManagedBridgeResource":
        from rmm_managed_bridge.resource import ManagedBridgeResource

        return ManagedBridgeResource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
