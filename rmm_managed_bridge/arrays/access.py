"""What memory is, and who may touch it. No question here touches the data."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, cast

from rmm_managed_bridge import machine
from rmm_managed_bridge._native import blocks
from rmm_managed_bridge.arrays.address import address_of
from rmm_managed_bridge.errors import AccessError, ViewError
from rmm_managed_bridge.frameworks import registry
from rmm_managed_bridge.frameworks.places import device_number

MemoryKind = Literal["host", "pinned", "device", "mempool", "managed", "system", "unknown"]
MemoryOwner = Literal["bridge", "other", "wrapped", "unknown"]

# Numbers of CUpointer_attribute and CUmemorytype, from cuda.h.
_MEMORY_TYPE = 2
_IS_MANAGED = 8
_DEVICE_ORDINAL = 9
_MEMPOOL_HANDLE = 17
_HOST_TYPE, _DEVICE_TYPE = 1, 2

_checked: ContextVar[bool] = ContextVar("rmm_managed_bridge.checked_access", default=False)


def memory_kind(x: Any) -> MemoryKind:
    """Return what kind of memory `x` lies in.

    Parameters
    ----------
    x
        An array of any framework, or an address.

    Returns
    -------
    str
        ``"managed"``, ``"system"`` (the C library's, which the devices of that pool use directly), ``"device"``,
        ``"mempool"`` (device memory of a CUDA memory pool), ``"pinned"`` or ``"host"``; ``"unknown"`` if neither the
        bridge nor the driver knows the address, and for what has none. Never an error.

    Notes
    -----
    A block of the bridge has the kind of its pool, and nobody is asked. Of other memory the driver says what it is. It
    knows nothing of ordinary host memory: that is ``"host"`` if an array of the CPU says that it is its own, and
    ``"unknown"`` as a bare address.

    Examples
    --------
    >>> bridge.memory_kind(np.ones(1000))
    'host'
    """
    return kind_at(x, pointer_of(x))


def memory_owner(x: Any) -> MemoryOwner:
    """Return whose memory `x` lies in.

    Parameters
    ----------
    x
        An array of any framework, or an address.

    Returns
    -------
    str
        ``"bridge"``: a live block of ours, whatever made the array. ``"other"``: memory that another allocator made.
        ``"wrapped"``: memory that the array's framework says it did not make itself. ``"unknown"``: nobody knows, as
        of a bare address of host memory, or of a block that was freed. Never an error.

    Examples
    --------
    >>> x = np.ones(1000)
    >>> bridge.uninstall()
    >>> bridge.memory_owner(x), bridge.memory_owner(np.ones(1000))
    ('bridge', 'other')
    """
    ptr = pointer_of(x)
    if ptr != 0 and blocks.block_of(ptr) is not None:
        return "bridge"
    if ptr == 0 or blocks.kind_of(ptr) is not None:
        return "unknown"
    owned = registry.owns_memory(x)
    if owned is not None:
        return "other" if owned else "wrapped"
    return "other" if blocks.driver_attribute(ptr, _MEMORY_TYPE) is not None else "unknown"


def can_access(device: Any, x: Any) -> bool:
    """Return True if code on `device` is known to be able to read and write `x` where it is.

    Parameters
    ----------
    device : "cpu", int, str, or a device object of CuPy, Warp or PyTorch
        Who would touch the memory: the CPU (also ``"host"``), or a CUDA device by number or as ``"cuda:0"``;
        ``"cuda"`` is device 0.
    x
        An array of any framework, or an address.

    Returns
    -------
    bool
        For managed memory, by what the devices can do; for the other kinds, by peer and memory-pool access as it is set
        up now. False when it cannot be known. Says nothing of order: see docs/guide/streams.md.

    Raises
    ------
    ConfigError
        If `device` is neither.

    Examples
    --------
    >>> bridge.can_access("cpu", np.ones(1000))
    True
    """
    return _why_not(_number_of(device, "can_access"), x) is None


def require_access(device: Any, x: Any) -> None:
    """Raise, unless `can_access`.

    Parameters
    ----------
    device
        ``"cpu"``, ``"cuda:0"``, a device number, or a device object of a framework; ``"cuda"`` is device 0.
    x
        An array of any framework, or an address.

    Raises
    ------
    AccessError
        With the reason, and what to do about it.
    ConfigError
        If `device` is not one.

    Examples
    --------
    >>> bridge.require_access("cpu", np.ones(1000))
    """
    reason = _why_not(_number_of(device, "require_access"), x)
    if reason is not None:
        raise AccessError(reason)


@contextlib.contextmanager
def checked_access() -> Iterator[None]:
    """Let every view that is made inside the block require that whoever gets it can touch it.

    `as_numpy` then requires access of the CPU, and `as_cupy`, `as_warp` and `as_torch` that of the device that is
    current in their framework, where the next kernel would run. A library that takes an `as_dlpack` export needs access
    from the device that it asks for, and one that names no stream, from the CPU. Without this only the kind of memory
    is looked at. The setting belongs to the context (`contextvars`): tasks inherit it, other threads do not.

    Examples
    --------
    >>> with bridge.checked_access():
    ...     total = bridge.as_numpy(np.ones(1000)).sum()
    """
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


def check_hand_over(device: Callable[[], Any], x: Any) -> None:
    """Inside `checked_access`, require that ``device()`` can access `x`."""
    if _checked.get():
        require_access(device(), x)


def pointer_of(x: Any) -> int:
    """Return the address of `x`, or 0."""
    try:
        ptr = address_of(x).ptr
    except (ViewError, AttributeError, RuntimeError, TypeError, ValueError):
        return 0
    return ptr if 0 < ptr < 1 << 64 else 0


def kind_at(x: Any, ptr: int) -> MemoryKind:
    """Return the kind of the memory at an address that `x` has; see `memory_kind`."""
    if ptr == 0:
        return "unknown"
    ours = blocks.kind_of(ptr)
    if ours is not None:
        return cast(MemoryKind, ours)
    kind = blocks.driver_attribute(ptr, _MEMORY_TYPE)
    if kind is not None and blocks.driver_attribute(ptr, _IS_MANAGED):
        return "managed"
    if kind == _HOST_TYPE:
        return "pinned"
    if kind == _DEVICE_TYPE:
        return "mempool" if blocks.driver_attribute(ptr, _MEMPOOL_HANDLE) else "device"
    return "host" if _is_on_cpu(x) else "unknown"


def _is_on_cpu(x: Any) -> bool:
    try:
        device = getattr(x, "device", None)
    except RuntimeError:
        return False
    if str(getattr(device, "type", device)) == "cpu" or getattr(device, "is_cpu", False):
        return True
    return isinstance(getattr(x, "__array_interface__", None), dict) and not hasattr(x, "__cuda_array_interface__")


def _number_of(device: Any, call: str) -> int:
    """Return a device's number; -1 for the CPU."""
    return device_number(device, "device", f"the device comes first, {call}(device, x)")


def _why_not(device: int, x: Any) -> str | None:
    """Return why a device (-1: the CPU) cannot access `x`, with the cure; None if it can."""
    ptr = pointer_of(x)
    kind = kind_at(x, ptr)
    what = f"this {type(x).__name__} lies in {kind} memory"
    if kind == "unknown":
        return (
            f"it is not known what memory this {type(x).__name__} lies in; pass the array itself, or make it while the "
            "bridge is installed for its framework"
        )
    home = _home_of(ptr)
    if device < 0:
        return _why_not_cpu(kind, home, what)
    count, why_none = machine.load_driver()
    if device >= count:
        return f"there is no device {device}: {why_none or f'the driver has {count}'}"
    able = machine.device_traits(device)
    if kind in ("host", "system"):
        return (
            None
            if able.pageable_memory_access
            else (
                f"{what}, and device {device} reports no access to pageable memory (no HMM or ATS); copy it, or make "
                "it in managed memory: install(backend='managed', ...)"
            )
        )
    if kind == "pinned":
        return (
            None
            if able.unified_addressing
            else (f"{what}, and device {device} has no unified addressing; copy it to the device")
        )
    if kind == "managed":
        return (
            None if able.managed_memory else f"{what}, and device {device} does not support it; copy it to the device"
        )
    if device == home or blocks.reaches(ptr, device):
        return None
    cure = "let the pool's devices share it (cuMemPoolSetAccess)" if kind == "mempool" else "enable peer access"
    return (
        f"{what} of device {home}, which device {device} has no access to; {cure}, copy it, or make it in managed "
        "memory"
    )


def _why_not_cpu(kind: str, home: int, what: str) -> str | None:
    if kind in ("host", "pinned", "system"):
        return None
    if kind == "managed":
        if home < 0 or machine.device_traits(home).concurrent_managed_access:
            return None
        return (
            f"{what} of device {home}, which cannot share it with the CPU while it is at work (no concurrent managed "
            "access); wait for the whole device first, or copy it to the host"
        )
    return f"{what}, which the CPU cannot reach; copy it to the host, or make it in managed memory"


def _home_of(ptr: int) -> int:
    """Return the device that memory was made for; -1 if none or not known."""
    ours = blocks.device_of(ptr)
    if ours is not None:
        return ours
    found = blocks.driver_attribute(ptr, _DEVICE_ORDINAL)
    return -1 if found is None else found
