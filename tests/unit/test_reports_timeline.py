import pytest

from rmm_managed_bridge.reports.timeline import MemorySample, framework_names, highest_sample


def test_sample_adds_up_its_frameworks() -> None:
    assert MemorySample(0.0, {"numpy": 3, "warp": 4}).current_bytes == 7


def test_frameworks_come_largest_first() -> None:
    samples = [MemorySample(0.0, {"numpy": 3}), MemorySample(1.0, {"numpy": 1, "warp": 9}), MemorySample(2.0, {})]
    assert framework_names(samples) == ("warp", "numpy")


def test_first_of_equal_peaks_is_the_highest() -> None:
    samples = [MemorySample(0.0, {"numpy": 3}), MemorySample(1.0, {"warp": 9}), MemorySample(2.0, {"numpy": 9})]
    assert highest_sample(samples).time_s == 1.0


def test_no_samples_have_no_highest() -> None:
    with pytest.raises(ValueError, match="no memory samples"):
        highest_sample([])
