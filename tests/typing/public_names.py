"""What a type checker must say about the public names. Checked by mypy, never run."""

from pathlib import Path
from typing import Any, Literal, NoReturn, assert_type

import numpy as np
from rmm.pylibrmm.memory_resource import DeviceMemoryResource

import rmm_managed_bridge as bridge
from rmm_managed_bridge.lifecycle.resource import ManagedBridgeResource
from rmm_managed_bridge.records import (
    Event,
    Generation,
    Groups,
    History,
    Holder,
    Hugepages,
    Peak,
    Records,
    SnapshotDifference,
    Usage,
)


def life() -> None:
    """`install` gives a Bridge, which is its own context manager, as `installed` does."""
    installed = bridge.install("host", frameworks=["numpy"], initial_pool_size="2GiB", devices=0)
    assert_type(installed, bridge.Bridge)
    with bridge.install("host") as first, bridge.installed(backend="host", track="off") as second:
        assert_type(first, bridge.Bridge)
        assert_type(second, bridge.Bridge)
    assert_type(installed.devices, tuple[int, ...])
    assert_type(installed.resources, dict[int, ManagedBridgeResource])
    assert_type(bridge.status(), bridge.Status)
    assert_type(bridge.status().notes, tuple[str, ...])
    assert_type(bridge.detect_backend(), tuple[str, str])


def recording() -> None:
    """`record` gives a Recording, which is its own context manager."""
    with bridge.record("a.rec", size="4MiB") as made:
        assert_type(made, bridge.Recording)
    assert_type(made.path, Path)
    assert_type(made.active, bool)


def resource(upstream: DeviceMemoryResource) -> None:
    """The resource is one of RMM's."""
    made = ManagedBridgeResource(upstream, device=0, track="counters", maximum_pool_size="1GiB")
    as_rmm: DeviceMemoryResource = made
    assert_type(made.allocate(64), int)
    assert_type(made.pool.numbers, tuple[int, int, int, int, int, int, int])
    assert_type(made.kind, str)
    ManagedBridgeResource("upstream")  # type: ignore[arg-type]
    ManagedBridgeResource(as_rmm, tracks="off")  # type: ignore[call-arg]


def records(x: object) -> None:
    """Records have precise fields, and group by the known keys only."""
    found = bridge.allocation_of(x)
    assert_type(found, bridge.Allocation | None)
    if found is not None:
        assert_type(found.site, bridge.CallSite)
        assert_type(found.requested_bytes, int)
        found.ptr = 0  # type: ignore[misc]
    snapshot = bridge.snapshot()
    assert_type(snapshot.peak, Peak)
    assert_type(snapshot.peak.top(), Records[Holder])
    assert_type(snapshot.peak.top(5)[:2], Records[Holder])
    assert_type(snapshot[0], bridge.Allocation)
    assert_type(bridge.history()[-3:], Records[Event])
    as_dict: dict[str, int] = snapshot.by("tag")
    assert_type(as_dict["load"], int)
    assert_type(snapshot.compare(snapshot), SnapshotDifference)
    assert_type(snapshot.compare(snapshot).top(), Records[Holder])
    snapshot.by("colour")  # type: ignore[arg-type]
    assert_type(bridge.stats().by("framework"), Groups[Usage])
    assert_type(bridge.stats().pools, tuple[Generation, ...])
    assert_type(bridge.stats().hugepages, Hugepages)
    assert_type(bridge.history(), History)
    assert_type(bridge.trim(), int)


def scopes() -> None:
    """Context managers give themselves."""
    with bridge.tag("load") as tag, bridge.peak_scope() as scope, bridge.numpy_allocator(kind="host"):
        assert_type(tag, bridge.tag)
        assert_type(scope.peak_bytes, int)


@bridge.numpy_allocator("host")
def decorated(count: int) -> str:
    """A decorated function keeps its type."""
    return str(count)


@bridge.numpy_allocator()
async def decorated_coroutine(count: int) -> str:
    """So does one that is awaited."""
    return str(count)


@bridge.tag("load", limit="1GiB")
def tagged(count: int) -> str:
    """A tagged function keeps its type."""
    return str(count)


async def calls() -> None:
    """Arguments and results are checked as before."""
    assert_type(decorated(1), str)
    assert_type(await decorated_coroutine(1), str)
    decorated("1")  # type: ignore[arg-type]
    assert_type(tagged(1), str)
    tagged("1")  # type: ignore[arg-type]


def hints(x: object) -> None:
    """Hints give results; presets are hints."""
    result = bridge.prefetch([x, (0x1000, 4096)], "cuda:0", stream=0)
    assert_type(result, bridge.HintResult)
    assert_type(result.reason, bridge.HintSkip | None)
    assert_type(bridge.advise(x, read_mostly=True, preferred_location=None, accessed_by=[0]), bridge.HintResult)
    assert_type(bridge.discard(x, strict=True), bridge.HintResult)
    assert_type(bridge.residency(x), bridge.Residency)
    assert_type(bridge.Hints.device, bridge.Hints)
    with bridge.using_hints("device:4MiB"), bridge.tag("table", hints=bridge.Hints("read_mostly", min_bytes="4MiB")):
        bridge.install(hints=bridge.Hints.host)
    assert_type(bridge.Hints("device", hugepages="never").hugepages, str | None)
    bridge.prefetch(x)  # type: ignore[call-arg]
    result.done = True  # type: ignore[misc]


def views(x: object) -> None:
    """CuPy, Warp and PyTorch have no complete types; NumPy has."""
    array = bridge.as_numpy(x)
    assert_type(array, np.ndarray[Any, Any])
    assert_type(bridge.owns(array), bool)
    assert_type(bridge.as_dlpack(array).__dlpack_device__(), tuple[int, int])
    np.from_dlpack(bridge.as_dlpack(array))
    assert_type(bridge.as_dlpack(array).__array__(), np.ndarray[Any, Any])
    np.asarray(bridge.as_dlpack(array))
    bridge.record_stream(array, 0)


def access(x: object) -> None:
    """Kinds and owners are words that a checker knows."""
    kind = bridge.memory_kind(x)
    if kind == "managed":
        assert_type(bridge.can_access("cpu", x), bool)
    assert_type(bridge.memory_kind(x), Literal["host", "pinned", "device", "mempool", "managed", "system", "unknown"])
    assert_type(bridge.memory_owner(x), Literal["bridge", "other", "wrapped", "unknown"])
    with bridge.checked_access():
        bridge.require_access(0, x)
    assert_type(bridge.ipc_handle(x), NoReturn)
