"""Mistakes that have no effect are heard: once, at the line that makes them, with what to do."""

from pathlib import Path

import numpy as np
import pytest

import rmm_managed_bridge as bridge

HERE = Path(__file__).name


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
