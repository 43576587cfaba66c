"""Wrong calls: the bridge's own errors, a line long, with what to write instead."""

import sys
from typing import Any

import numpy as np
import pytest

import rmm_managed_bridge as bridge

ARRAY = np.ones(1000)


@pytest.mark.behaviour("U2")
@pytest.mark.parametrize(
    "call",
    [
        lambda: bridge.install(ARRAY),
        lambda: bridge.install("host", maximum_pool_size=ARRAY),
        lambda: bridge.install("host", release_threshold=ARRAY),
        lambda: bridge.install("host", hints=ARRAY),
        lambda: bridge.install("host", frameworks=[ARRAY]),
        lambda: bridge.install("host", on_oom=ARRAY),
        lambda: bridge.Hints(ARRAY),
        lambda: bridge.Hints(hugepages=ARRAY),
        lambda: bridge.ManagedBridgeResource(ARRAY),
        lambda: bridge.numpy_allocator(ARRAY),
        lambda: bridge.numpy_allocator()(ARRAY),
        lambda: bridge.tag(ARRAY),
        lambda: bridge.tag("a", limit=ARRAY),
        lambda: bridge.using_hints(ARRAY),
        lambda: bridge.prefetch(ARRAY, ARRAY),
        lambda: bridge.snapshot().compare(ARRAY),
        lambda: bridge.snapshot().by(ARRAY),
        lambda: bridge.record_events(ARRAY),
    ],
)
def test_no_error_holds_the_elements_of_an_array(call: Any) -> None:
    with pytest.raises(bridge.BridgeError, match=r"of shape \(1000,\), float64") as caught:
        call()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bridge.snapshot().compare(None), bridge.ConfigError, r"takes an earlier snapshot\(\), not None"),
        (lambda: bridge.snapshot().by("colour"), bridge.ConfigError, "cannot group by 'colour'"),
        (lambda: bridge.as_numpy(3), bridge.ViewError, "3 is an address"),
        (lambda: bridge.allocation_of(memoryview(b"abc")), bridge.ViewError, r"numpy\.asarray\(x\)"),
        (lambda: bridge.tag("2GiB", "load"), bridge.ConfigError, r"limit='load' is not a size.*name comes first"),
        (lambda: bridge.tag("a", "load"), bridge.ConfigError, r"limit='load' is not a size; write [^;]*$"),
        (lambda: bridge.tag(100, "load"), bridge.ConfigError, r"name comes first, tag\(name, limit\)"),
    ],
)
def test_pythons_own_errors_are_ours(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_frame_of_columns_is_told_how_to_show_its_arrays() -> None:
    class Frame:
        def to_numpy(self) -> None: ...

    with pytest.raises(bridge.ViewError, match=r"pass x\.to_numpy\(\)"):
        bridge.allocation_of(Frame())


def test_the_allocators_alone_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from rmm_managed_bridge.adapters import cupy as adapter

    monkeypatch.setattr(adapter, "_entry", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(bridge.FrameworkError, match="cupy cannot be imported"):
        bridge.cupy_allocator(100)


@pytest.mark.requires("no_gpu")
def test_warps_allocator_says_that_there_is_no_device() -> None:
    with pytest.raises(bridge.FrameworkError, match="on CUDA devices only, and there is none here"):
        bridge.warp_allocator.allocate(100)


def test_a_second_install_repeats_what_was_typed() -> None:
    with bridge.installed("host", maximum_pool_size="1GiB"):
        with pytest.raises(bridge.InstallError, match=r"maximum_pool_size='2.00 GiB' \(is '1.00 GiB'\)"):
            bridge.install(maximum_pool_size="2GiB")
        with pytest.raises(bridge.InstallError, match=r"hints='device from 1.00 MiB' \(is 'none'\)"):
            bridge.install(hints="device")


def test_a_first_size_above_the_largest_names_where_each_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMM_BRIDGE_MAXIMUM_POOL_SIZE", "1MiB")
    with pytest.raises(bridge.ConfigError, match=r"initial_pool_size .* is more than RMM_BRIDGE_MAXIMUM_POOL_SIZE"):
        bridge.install("host", initial_pool_size="2MiB")
