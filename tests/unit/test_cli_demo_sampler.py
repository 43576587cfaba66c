import itertools
import threading
import time

import pytest

from rmm_managed_bridge.cli.demo.sampler import MemorySampler, thin
from rmm_managed_bridge.reports.timeline import MemorySample


def test_marks_are_kept_in_order_with_what_was_held_then() -> None:
    sizes_bytes = {"numpy": 1}
    with MemorySampler(lambda: sizes_bytes, interval_s=60) as sampler:
        sampler.mark("prepare")
        sizes_bytes = {"numpy": 5}
        sampler.mark("step")
    marked = [(sample.marks, sample.bytes_by_framework["numpy"]) for sample in sampler.samples if sample.marks]
    assert marked == [(("prepare",), 1), (("step",), 5)]


def test_samples_are_taken_in_the_background_in_order_of_time() -> None:
    counter = itertools.count()
    with MemorySampler(lambda: {"numpy": next(counter)}, interval_s=0.001) as sampler:
        deadline_s = time.monotonic() + 30
        while len(sampler.samples) < 5 and time.monotonic() < deadline_s:
            time.sleep(0.001)
    times_s = [sample.time_s for sample in sampler.samples]
    assert len(times_s) >= 5
    assert times_s == sorted(times_s)


def test_failure_in_the_background_is_raised_at_the_end() -> None:
    calls = itertools.count()
    failed = threading.Event()

    def read() -> dict[str, int]:
        if next(calls):
            failed.set()
            raise RuntimeError("the ledger is gone")
        return {}

    sampler = MemorySampler(read, interval_s=0.001)
    with pytest.raises(RuntimeError, match="the ledger is gone"), sampler:
        failed.wait(30)


def test_error_of_the_work_is_not_replaced() -> None:
    with pytest.raises(ZeroDivisionError), MemorySampler(dict, interval_s=0.001):
        raise ZeroDivisionError


def test_thinning_halves_and_keeps_peaks_and_marks() -> None:
    samples = [MemorySample(float(n), {"numpy": n % 7}) for n in range(101)]
    samples[50] = MemorySample(50.0, {"numpy": 0}, ("step",))
    samples[61] = MemorySample(61.0, {"numpy": 99})
    kept = thin(samples)
    assert len(kept) <= 53
    assert samples[50] in kept
    assert samples[61] in kept
    assert [sample.time_s for sample in kept] == sorted(sample.time_s for sample in kept)
