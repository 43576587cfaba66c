import sys
from pathlib import Path

import numpy as np
import pytest

from rmm_managed_bridge.errors import BridgeError
from rmm_managed_bridge.reports.pictures import require_matplotlib, save_field, save_memory_over_time
from rmm_managed_bridge.reports.timeline import MemorySample

MIB = 1 << 20
PNG = b"\x89PNG\r\n\x1a\n"


def samples() -> list[MemorySample]:
    return [
        MemorySample(0.0, {}, ("prepare",)),
        MemorySample(0.5, {"numpy": 12 * MIB}),
        MemorySample(1.0, {"numpy": 12 * MIB, "cupy": 4 * MIB, "somebody": MIB}, ("step", "sample")),
        MemorySample(1.5, {"warp": 4 * MIB}),
    ]


def colours_of(path: Path) -> np.ndarray:
    image = pytest.importorskip("matplotlib.image")
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    return np.unique(pixels.reshape(-1, 3), axis=0)


def test_memory_picture_shows_each_framework_in_its_colour(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = colours_of(
        save_memory_over_time([MemorySample(0.0, {"numpy": MIB}), MemorySample(1.0)], tmp_path / "one.png")
    )
    path = save_memory_over_time(samples(), tmp_path / "memory.png")
    assert path.read_bytes().startswith(PNG)
    assert len(colours_of(path)) > len(one)


def test_peak_line_appears_only_where_the_peak_is_known(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    without = save_memory_over_time(samples(), tmp_path / "without.png")
    with_peak = save_memory_over_time(samples(), tmp_path / "with.png", peak_bytes=40 * MIB)
    assert without.read_bytes() != with_peak.read_bytes()


@pytest.mark.parametrize("only", [MemorySample(0.0, {}), MemorySample(0.0, {"numpy": MIB}, ("start",))])
def test_one_sample_is_enough_for_a_picture(tmp_path: Path, only: MemorySample) -> None:
    pytest.importorskip("matplotlib")
    assert save_memory_over_time([only], tmp_path / "one.png").read_bytes().startswith(PNG)


def test_no_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no memory samples"):
        save_memory_over_time([], tmp_path / "none.png")


def test_drawing_needs_neither_display_nor_pyplot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    save_memory_over_time(samples(), tmp_path / "memory.png")
    save_field([np.ones((4, 4), np.float32)], ["one"], tmp_path / "field.png")


def most_common_colours(path: Path, count: int) -> list[list[int]]:
    """Return the colours of most pixels but white: those of the panels, since a colour bar has little of each."""
    image = pytest.importorskip("matplotlib.image")
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    colours, counts = np.unique(pixels[(pixels != 255).any(axis=1)], axis=0, return_counts=True)
    common: list[list[int]] = colours[np.argsort(-counts)[:count]].tolist()
    return common


def test_fields_share_one_scale_with_zero_in_its_middle(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    up, nothing = np.full((8, 8), 0.5, np.float32), np.zeros((8, 8), np.float32)
    path = save_field([up, nothing], ["up", "nothing"], tmp_path / "field.png")
    top, middle = sorted(most_common_colours(path, 2))
    assert top == [103, 0, 31]
    assert min(middle) > 240


def test_field_of_zeros_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert save_field([np.zeros((8, 8), np.float32)], ["flat"], tmp_path / "flat.png").exists()


def test_title_for_each_field_is_required(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 titles"):
        save_field([np.zeros((8, 8), np.float32)], ["one", "two"], tmp_path / "flat.png")


def test_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(BridgeError, match="nowhere"):
        save_field([np.ones((8, 8), np.float32)], ["one"], tmp_path / "nowhere" / "field.png")


def test_missing_matplotlib_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BridgeError, match=r"pip install .rmm-managed-bridge\[demo\]"):
        require_matplotlib()
