"""One RMM managed-memory pool behind NumPy, CuPy, Warp and everything that uses RMM, which knows who holds it.

Importing this has no effect: no framework is imported and no GPU is touched before `install`.
"""

from typing import TYPE_CHECKING, Any

from rmm_managed_bridge.adapters.cupy import cupy_allocator
from rmm_managed_bridge.adapters.numpy_allocator import numpy_allocator
from rmm_managed_bridge.adapters.torch import torch_mempool
from rmm_managed_bridge.adapters.warp import WarpAllocator
from rmm_managed_bridge.arrays.access import can_access, checked_access, memory_kind, memory_owner, require_access
from rmm_managed_bridge.arrays.ipc import ipc_handle
from rmm_managed_bridge.config import Hints
from rmm_managed_bridge.errors import (
    AccessError,
    BackendError,
    BridgeError,
    BridgeWarning,
    ConfigError,
    ForeignPointerError,
    FrameworkError,
    InstallError,
    ViewError,
    warn_renamed,
)
from rmm_managed_bridge.hints.calls import advise, discard, prefetch, residency
from rmm_managed_bridge.hints.policy import using_hints
from rmm_managed_bridge.hints.results import HintResult, HintSkip, Residency
from rmm_managed_bridge.lifecycle.install import Bridge, install, uninstall
from rmm_managed_bridge.lifecycle.installed import installed
from rmm_managed_bridge.lifecycle.recorder import Recording, record
from rmm_managed_bridge.machine import detect_backend
from rmm_managed_bridge.overview import (
    allocation_of,
    history,
    peak_scope,
    record_events,
    reset_peak,
    snapshot,
    stats,
    status,
    synchronize,
    trim,
)
from rmm_managed_bridge.records import Allocation, CallSite, Snapshot, Stats, Status
from rmm_managed_bridge.tags import tag
from rmm_managed_bridge.views.common import owns, record_stream
from rmm_managed_bridge.views.cupy import as_cupy
from rmm_managed_bridge.views.dlpack import as_dlpack
from rmm_managed_bridge.views.numpy import as_numpy
from rmm_managed_bridge.views.torch import as_torch
from rmm_managed_bridge.views.warp import as_warp

if TYPE_CHECKING:
    from rmm_managed_bridge.lifecycle.resource import ManagedBridgeResource

__version__ = "0.1.0"

warp_allocator = WarpAllocator()
"""For ``warp.set_cuda_allocator(bridge.warp_allocator)`` and its kin: serves each device from its newest pool."""

__all__ = [
    "AccessError",
    "Allocation",
    "BackendError",
    "Bridge",
    "BridgeError",
    "BridgeWarning",
    "CallSite",
    "ConfigError",
    "ForeignPointerError",
    "FrameworkError",
    "HintResult",
    "HintSkip",
    "Hints",
    "InstallError",
    "ManagedBridgeResource",
    "Recording",
    "Residency",
    "Snapshot",
    "Stats",
    "Status",
    "ViewError",
    "advise",
    "allocation_of",
    "as_cupy",
    "as_dlpack",
    "as_numpy",
    "as_torch",
    "as_warp",
    "can_access",
    "checked_access",
    "cupy_allocator",
    "detect_backend",
    "discard",
    "history",
    "install",
    "installed",
    "ipc_handle",
    "memory_kind",
    "memory_owner",
    "numpy_allocator",
    "owns",
    "peak_scope",
    "prefetch",
    "record",
    "record_events",
    "record_stream",
    "require_access",
    "reset_peak",
    "residency",
    "snapshot",
    "stats",
    "status",
    "synchronize",
    "tag",
    "torch_mempool",
    "trim",
    "uninstall",
    "using_hints",
    "warp_allocator",
]


def __getattr__(name: str) -> Any:
    # RMM is imported with its resource class, and takes 0.3 s; the host backend does without.
    if name == "ManagedBridgeResource":
        from rmm_managed_bridge.lifecycle.resource import ManagedBridgeResource

        return ManagedBridgeResource
    if name == "ownership":
        warn_renamed("ownership", "memory_owner")
        return memory_owner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
