"""Mistakes that have no effect are heard: once, at the line that makes them, with what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rmm_managed_bridge as bridge

HERE = Path(__file__).name

pytestmark = pytest.mark.behaviour("U1")


def test_a_misspelt_variable_is_told_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMM_BRIDGE_BACKND", "host")
    monkeypatch.setenv("RMM_BRIDGE_ON_OOM", "drop_cache")
    with pytest.warns(bridge.BridgeWarning) as said, bridge.installed("host"):
        pass
    assert len(said) == 1
    assert "RMM_BRIDGE_BACKND is ignored: did you mean RMM_BRIDGE_BACKEND?" in str(said[0].message)
    assert "RMM_BRIDGE_ON_OOM is ignored" in str(said[0].message)
    assert Path(said[0].filename).name == HERE


def test_known_variables_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMM_BRIDGE_BACKEND", "host")
    monkeypatch.setenv("RMM_BRIDGE_DRIVER_LIBRARY", "libno_such_driver.so.1")
    monkeypatch.setenv("RMM_BRIDGE_NUMPY_MIN_BYTES", "")
    with bridge.installed():
        assert bridge.owns(np.ones(10))


def test_warnings_that_are_errors_leave_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMM_BRIDGE_BACKND", "host")
    with pytest.raises(bridge.BridgeWarning, match="BACKND"):
        bridge.install("host")
    assert not bridge.status().installed


def test_installed_is_no_question() -> None:
    with pytest.raises(bridge.BridgeError, match=r"ask status\(\)\.installed"):
        assert bridge.installed()
    assert not bridge.status().installed


def test_installed_is_for_one_block_at_a_time_and_may_be_used_again() -> None:
    block = bridge.installed("host")
    for _ in range(2):
        with block as entered:
            assert bridge.status().installed
            with pytest.raises(bridge.InstallError, match="entered already"), block:
                pass
            assert bridge.install() is entered
        assert not bridge.status().installed
    with pytest.raises(bridge.InstallError, match="never entered"):
        block.__exit__(None, None, None)


def test_installed_decorates_functions_that_call_themselves() -> None:
    @bridge.installed("host", frameworks=["numpy"])
    def depth(left: int) -> int:
        assert bridge.owns(np.ones(10))
        return 1 + depth(left - 1) if left else 0

    assert depth(3) == 3
    assert not bridge.status().installed


def test_a_bridge_that_is_uninstalled_says_so_and_is_not_entered() -> None:
    gone = bridge.install("host")
    assert "hooked: numpy" in repr(gone)
    gone.uninstall()
    assert repr(gone) == "<Bridge: host, not installed>"
    with pytest.raises(bridge.InstallError, match=r"was uninstalled; call install\(\) again"), gone:
        pass
    with bridge.installed("host"), pytest.raises(bridge.InstallError, match="was uninstalled"), gone:
        pass


def keywords_only(*, size_bytes: int, attempt: int) -> bool:
    return bool(size_bytes and attempt)


@pytest.mark.parametrize(
    "on_oom", [lambda: True, lambda size_bytes: True, lambda a, b, c: True, keywords_only, "drop_cache"], ids=repr
)
def test_a_callback_is_looked_at_when_it_is_given(on_oom: Any) -> None:
    with pytest.raises(bridge.ConfigError, match=r"on_oom=.*\(size_bytes, attempt\)"):
        bridge.install("host", on_oom=on_oom)
    assert not bridge.status().installed


@pytest.mark.parametrize(
    "on_oom", [lambda *both: False, lambda size_bytes, attempt, more=1: False, [1, 2].index, max], ids=repr
)
def test_callbacks_that_can_be_called_are_taken(on_oom: Callable[..., Any]) -> None:
    with bridge.installed("host", on_oom=on_oom):
        pass


def test_sizes_without_effect_on_host_are_told() -> None:
    """The first size of a pool is right in a program that also runs without a GPU: `status` says what becomes of it."""
    with bridge.installed("host", initial_pool_size="2GiB"):
        assert "note: initial_pool_size (2.00 GiB) has no effect on the host backend" in str(bridge.status())
    assert bridge.status().notes == ()
    with (
        pytest.warns(bridge.BridgeWarning, match="maximum_quarantine_size has no effect on host") as said,
        bridge.installed("host", maximum_quarantine_size="1GiB"),
    ):
        pass
    assert [Path(each.filename).name for each in said] == [HERE]
    with (
        pytest.warns(bridge.BridgeWarning, match="maximum_quarantine_size and wait_timeout have no effect on host"),
        bridge.installed("host", maximum_quarantine_size="1GiB", wait_timeout=5),
    ):
        pass
    with bridge.installed("host", maximum_pool_size="1GiB", release_threshold="1MiB", numpy_min_bytes=1):
        assert bridge.status().notes == ()


@pytest.mark.parametrize(("name", "value"), [("hints", "device"), ("ordering", "recorded")])
def test_what_only_a_device_has_is_told_where_host_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(bridge.BridgeWarning, match=rf"{name} \({value}\) .* no effect on the host backend") as said:
        bridge.install("host", **{name: value})  # type: ignore[arg-type]
    assert [Path(each.filename).name for each in said] == [HERE]
    bridge.install("host", **{name: value})  # type: ignore[arg-type]  # told once
    bridge.uninstall()
    monkeypatch.setenv("RMM_BRIDGE_BACKEND", "host")  # a program for a GPU, run without one
    with bridge.installed(**{name: value}):
        assert f"note: {name} ({value})" in str(bridge.status())


def test_hints_are_checked_on_host_as_elsewhere() -> None:
    with bridge.installed("host"):
        x = np.ones(1 << 18)
        for read_mostly in ("yes", 1, x):
            with pytest.raises(bridge.ConfigError, match=r"read_mostly=.* is not True, False or None"):
                bridge.advise(x, read_mostly=read_mostly)  # type: ignore[arg-type]
        with pytest.raises(bridge.ConfigError, match=r"to=99: device 99 does not exist"):
            bridge.prefetch(x, 99)
        with pytest.raises(bridge.ConfigError, match="neither a pair"):
            bridge.prefetch((1, 2, 3), "cpu")
        assert bridge.advise(x, read_mostly=np.bool_(True)).reason == bridge.HintSkip.HOST
        assert bridge.prefetch(x, 1).reason == bridge.HintSkip.HOST
        del x


@pytest.mark.behaviour("U2")
def test_arguments_in_the_wrong_order_are_told_without_their_elements() -> None:
    x = np.ones(1000)
    for wrong, first in (
        (lambda: bridge.can_access(x, "cpu"), "device comes first, can_access(device, x)"),
        (lambda: bridge.require_access(x, "cpu"), "device comes first, require_access(device, x)"),
        (lambda: bridge.prefetch("cpu", x), "array comes first, prefetch(x, to)"),
        (lambda: bridge.advise("cpu", preferred_location=x), "array comes first, advise(x, preferred_location="),
        (lambda: bridge.record_stream(0, x), "array comes first, record_stream(x, stream)"),
    ):
        with pytest.raises(bridge.BridgeError) as caught:
            wrong()
        assert first in str(caught.value)
        assert "of shape (1000,), float64" in str(caught.value)
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize("cpu", ["cpu", "CPU", "host", "Host"])
def test_words_for_places_mean_the_same_in_each_call(cpu: str) -> None:
    with bridge.installed("host"):
        x = np.ones(1 << 18)
        assert bridge.can_access(cpu, x)
        bridge.require_access(cpu, x)
        assert bridge.prefetch(x, cpu).reason == bridge.HintSkip.HOST
        assert bridge.advise(x, preferred_location=cpu).reason == bridge.HintSkip.HOST
        assert bridge.prefetch(x, "cuda").reason == bridge.HintSkip.HOST
        assert bridge.advise(x, accessed_by=["CUDA:0", "cuda"]).reason == bridge.HintSkip.HOST
        del x


def test_without_records_limits_events_and_questions_are_told_once_each() -> None:
    with bridge.installed("host", frameworks=["numpy"], track="off"):
        x = np.ones(1000)
        for action, text in (
            (lambda: bridge.tag("a", limit="1KiB").__enter__().__exit__(None, None, None), "limits nothing"),
            (lambda: bridge.record_events(100), "will see failures only"),
            (lambda: bridge.allocation_of(x), "this ndarray is in the bridge, but its allocation was not recorded"),
        ):
            with pytest.warns(bridge.BridgeWarning, match=text) as said:
                assert action() is None
            assert len(said) == 1
            assert "track='off' records nothing; use install(track='counters')" in str(said[0].message)
            assert Path(said[0].filename).name == HERE
        assert "not recorded (track='off')" in str(bridge.stats())
        assert repr(bridge.snapshot()) == "<Snapshot: not recorded (track='off')>"
        assert bridge.allocation_of(np.ones(0).ctypes.data + (1 << 40)) is None, "not ours: no word about it"
        bridge.record_events(1000, every_event=False)


def test_a_line_that_is_not_recorded_is_not_said_to_be_native() -> None:
    with bridge.installed("host", frameworks=["numpy"], track="counters", maximum_pool_size="64MiB"):
        bridge.record_events(100)
        with bridge.tag("kept", limit="1MiB"):
            x = np.ones(1000)
        record = bridge.allocation_of(x)
        assert record is not None
        assert str(record.site) == "not recorded"
        snapshot = bridge.snapshot()
        assert set(snapshot.by("site")) == {"not recorded"}
        assert "native" not in bridge.stats().by("site")
        assert {str(event.site) for event in bridge.history() if event.tag == "kept"} == {"not recorded"}
        with pytest.raises(MemoryError) as caught:
            np.ones(1 << 30)
        assert "native" not in "".join(caught.value.__notes__)
        bridge.record_events(1000, every_event=False)
        del x
    with bridge.installed("host", frameworks=["numpy"]):
        x = np.ones(1000)
        assert HERE in str(bridge.allocation_of(x))
        del x


@pytest.mark.parametrize("limit", ["all", 1.5, None, True, -1, 1 << 40])
def test_the_events_to_keep_are_a_number(limit: Any) -> None:
    with pytest.raises(bridge.ConfigError, match="limit="):
        bridge.record_events(limit)


def test_a_peak_scope_that_was_never_entered_says_so() -> None:
    with pytest.raises(bridge.ConfigError, match="never entered"):
        bridge.peak_scope().__exit__(None, None, None)
