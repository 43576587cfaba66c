"""The demo on an invented bridge: ordinary NumPy memory under a pretended ledger."""

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rmm_managed_bridge.cli.demo import fields, run, stages
from rmm_managed_bridge.cli.demo.fields import SharedField, make_field
from rmm_managed_bridge.cli.main import main
from rmm_managed_bridge.errors import BackendError, BridgeError
from rmm_managed_bridge.records import Allocation, CallSite, Peak, Snapshot

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None or importlib.util.find_spec("skimage") is None,
    reason="the demo needs the extra packages of [demo]",
)

SITE = CallSite("sim.py", 9, "run")


class InventedBridge:
    """Has the names that the demo uses, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.tags: list[str] = []
        self.in_pool = True
        self.installed = False

    @contextlib.contextmanager
    def install(self, **asked: Any) -> Any:
        self.asked = asked
        if asked["backend"] == "managed":
            raise BackendError("backend='managed' needs a GPU; use 'host'")
        self.installed = True
        yield SimpleNamespace(backend="host", reason="invented for a test")
        self.installed = False

    @contextlib.contextmanager
    def tag(self, name: str) -> Any:
        self.tags.append(name)
        yield

    def detect_backend(self) -> tuple[str, str]:
        return "host", "invented for a test"

    def status(self) -> Any:
        return SimpleNamespace(frameworks={"numpy": "hooked"}, devices=())

    def stats(self) -> Any:
        return SimpleNamespace(by=lambda key: {"numpy": SimpleNamespace(current_bytes=1 << 20)})

    def snapshot(self) -> Snapshot:
        block = Allocation(4096, 1 << 20, "numpy", SITE, "prepare", -1, 0, 1, 0, "host", 1, 0)
        return Snapshot((block,), 1 << 20, Peak(2 << 20, ()))

    def allocation_of(self, address: int) -> Any:
        return "something" if self.in_pool else None

    def reset_peak(self) -> None:
        pass

    def as_numpy(self, array: Any) -> Any:
        return array if isinstance(array, np.ndarray) else array.numpy()


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> InventedBridge:
    bridge = InventedBridge()
    for module in (run, fields, stages):
        monkeypatch.setattr(module, "bridge", bridge)
    monkeypatch.setattr(run, "import_warp", lambda: False)
    return bridge


@pytest.fixture
def run_demo(tmp_path: Path) -> Callable[..., int]:
    return lambda *more: main(["demo", "--size", "64", "--steps", "12", "--output", str(tmp_path / "out"), *more])


def test_demo_checks_its_answer_and_writes_two_pictures(
    invented: InventedBridge, run_demo: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo() == 0
    text = capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["memory.png", "wave.png"]
    assert str(tmp_path / "out" / "wave.png") in text
    assert "FAIL" not in text
    assert text.count("ok  ") == 4
    assert "sim.py:9" in text
    assert not invented.installed


def test_demo_works_without_warp_and_says_so(
    invented: InventedBridge, run_demo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo() == 0
    text = capsys.readouterr().out
    assert "Warp is not installed" in text
    assert "cells by NumPy in turn" not in text
    assert "cells by NumPy" in text


def test_demo_asks_for_a_small_pool_and_tags_its_phases(invented: InventedBridge, run_demo: Callable[..., int]) -> None:
    assert run_demo("--backend", "host") == 0
    assert invented.asked["backend"] == "host"
    assert invented.asked["initial_pool_size"] == "512MiB"
    assert {"prepare", "step", "analyse"} <= set(invented.tags)


def test_wrong_answer_is_code_1(
    invented: InventedBridge,
    run_demo: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stand_still(self: object, previous: SharedField, current: SharedField, following: SharedField) -> None:
        following.numpy[...] = current.numpy

    monkeypatch.setattr(stages.NumpyStage, "step", stand_still)
    assert run_demo() == 1
    captured = capsys.readouterr()
    assert "FAIL differs from the exact solution" in captured.out
    assert "the demo's answer is wrong" in captured.err


def test_backend_that_is_not_there_is_code_1(
    invented: InventedBridge, run_demo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo("--backend", "managed") == 1
    assert "use 'host'" in capsys.readouterr().err


def test_output_that_cannot_be_made_is_code_1_before_any_work(
    invented: InventedBridge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["demo", "--output", str(tmp_path / "file" / "out")]) == 1
    assert "choose another with --output" in capsys.readouterr().err
    assert invented.asked == {}


def test_copy_on_the_way_is_refused(invented: InventedBridge) -> None:
    block = np.zeros((4, 4), np.float32)
    copied = SimpleNamespace(ptr=block.ctypes.data + 64, numpy=lambda: block)
    with pytest.raises(BridgeError, match="was copied"):
        SharedField(maker="numpy", numpy=block, warp=copied).require_one_block()


def test_field_outside_the_pool_is_refused(invented: InventedBridge) -> None:
    field = make_field(4, "numpy", with_cupy=False, warp_device=None)
    field.require_one_block()
    invented.in_pool = False
    with pytest.raises(BridgeError, match="not in the bridge's pool"):
        field.require_one_block()
