"""What a pool does when memory is short: garbage, the user's callback, limits of tags, and an error worth reading."""

import gc
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.waiting import eventually

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.config import PoolSettings
from rmm_managed_bridge.units import format_bytes

MIB = 1 << 20


@pytest.fixture
def small_pool() -> Iterator[Any]:
    """The bridge on a host pool of at most 32 MiB."""
    with bridge.installed("host", frameworks=["numpy"], maximum_pool_size="32MiB"):
        yield native_pool.pools()[-1]


class Callback:
    """An `on_oom` that answers as told and remembers what it was asked."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, size_bytes: int, attempt: int) -> object:
        self.asked.append((size_bytes, attempt))
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, Exception):
            raise answer
        return answer


def install(on_oom: Any) -> Any:
    return bridge.installed("host", frameworks=["numpy"], maximum_pool_size="32MiB", on_oom=on_oom)


@pytest.mark.behaviour("M3")
def test_the_callback_gets_size_and_attempt_and_one_retry_for_each_yes() -> None:
    callback = Callback(True, False)
    with install(callback):
        before = bridge.stats().failures
        with pytest.raises(MemoryError):
            np.empty(64 * MIB, "u1")
        assert callback.asked == [(64 * MIB, 1), (64 * MIB, 2)]
        assert bridge.stats().failures == before + 1, "one request failed, however often it was tried"


@pytest.mark.behaviour("M3")
def test_a_callback_that_makes_room_saves_the_request() -> None:
    kept: list[Any] = []

    def make_room(size_bytes: int, attempt: int) -> bool:
        kept.clear()
        return attempt == 1

    with install(make_room):
        kept.append(np.ones(20 * MIB, "u1"))
        assert bridge.owns(np.ones(20 * MIB, "u1"))
        kept.append(np.ones(20 * MIB, "u1"))
        array = np.ones(MIB, "u1")
        array.resize(20 * MIB)
        assert bridge.owns(array) and not kept


@pytest.mark.behaviour("M3")
@pytest.mark.parametrize("route", ["numpy", "heap"])
def test_a_callback_that_raises_leaves_the_memory_error(route: str) -> None:
    callback = Callback(ValueError("the cache is locked"))
    with install(callback), pytest.raises(MemoryError) as raised:
        if route == "numpy":
            np.empty(64 * MIB, "u1")
        else:
            native_pool.pools()[-1].allocate(64 * MIB, cpu=True)
    assert callback.asked == [(64 * MIB, 1)]
    if route == "heap":
        assert raised.value.__notes__ == ["on_oom raised ValueError: the cache is locked"]


@pytest.mark.behaviour("M3")
def test_a_callback_that_runs_out_itself_is_not_called_again() -> None:
    seen: list[str] = []

    def greedy(size_bytes: int, attempt: int) -> bool:
        try:
            np.empty(size_bytes, "u1")
        except MemoryError:
            seen.append("inner")
        return False

    with install(greedy), pytest.raises(MemoryError):
        np.empty(64 * MIB, "u1")
    assert seen == ["inner"]


@pytest.mark.behaviour("M3")
def test_ctrl_c_in_the_callback_is_not_lost() -> None:
    def interrupted(size_bytes: int, attempt: int) -> bool:
        raise KeyboardInterrupt

    with install(interrupted), pytest.raises(KeyboardInterrupt):
        try:
            np.empty(64 * MIB, "u1")
        except MemoryError:
            for _ in range(1000):  # it arrives between two instructions
                pass


@pytest.mark.behaviour("M3")
def test_garbage_makes_room_but_never_inside_numpys_functions(small_pool: Any) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.array = np.empty(20 * MIB, "u1")
            self.me = self

    gc.collect()
    gc.disable()
    try:
        Cycle()
        with pytest.raises(MemoryError):
            np.empty(20 * MIB, "u1")
        ptr = small_pool.allocate(20 * MIB, cpu=True)
    finally:
        gc.enable()
    small_pool.deallocate(ptr)


def test_the_callback_goes_with_uninstall() -> None:
    callback = Callback()
    with install(callback):
        pass
    with bridge.installed("host", frameworks=["numpy"], maximum_pool_size="32MiB"), pytest.raises(MemoryError):
        np.empty(64 * MIB, "u1")
    assert callback.asked == []
    with pytest.raises(bridge.ConfigError, match="on_oom=3 cannot be called"):
        bridge.install("host", on_oom=3)  # type: ignore[arg-type]


@pytest.mark.behaviour("M4")
def test_the_error_says_what_was_asked_what_there_is_and_who_holds_it(small_pool: Any) -> None:
    first = sys._getframe().f_lineno + 1
    a = np.ones(4 * MIB, "u1")
    b = np.ones(4 * MIB, "u1")
    c = np.ones(4 * MIB, "u1")
    d = np.ones(4 * MIB, "u1")
    e = np.ones(4 * MIB, "u1")
    f = np.ones(3 * MIB, "u1")
    with pytest.raises(MemoryError) as raised:
        small_pool.allocate(16 * MIB, cpu=True)
    text = str(raised.value)
    stats = bridge.stats()
    assert text.startswith("cannot allocate 16.0 MiB: 23.0 MiB live, ")
    found = re.search(r"live, (.*) of at most (.*) reserved, largest free piece (.*), 0 B waiting", text)
    assert found is not None
    reserved, limit, largest = found.groups()
    assert (reserved, limit) == (f"{stats.reserved_bytes / MIB:.1f} MiB", "32.0 MiB")
    assert largest == format_bytes(small_pool.numbers[3])
    assert all(f"4.00 MiB in 1, numpy, {__file__}:{first + number}," in text for number in range(5))
    assert str(first + 5) not in text, "the five largest, no more"
    del a, b, c, d, e, f


@pytest.mark.behaviour("M5")
def test_a_loop_with_one_pattern_reaches_its_size_and_stays() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        carried = np.ones(MIB, "u1")
        reserved = []
        for round_ in range(500):
            large = np.full(13 * MIB, round_ & 0xFF, "u1")
            small = np.ones(MIB, "u1")
            small[0] = carried[0]
            carried = small
            del large, small
            reserved.append(bridge.stats().reserved_bytes)
        assert max(reserved[50:]) <= max(reserved[:50])
        ptr = carried.ctypes.data
        del carried
        assert bridge.allocation_of(ptr) is None


def test_a_tag_with_a_limit_refuses_what_passes_it() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        with bridge.tag("load", limit="10MiB"):
            kept = [np.empty(4 * MIB, "u1"), np.empty(4 * MIB, "u1")]
            with pytest.raises(MemoryError):
                np.empty(4 * MIB, "u1")
            with pytest.raises(MemoryError, match=r"tag 'load' has 8.00 MiB live of 10.0 MiB"):
                native_pool.pools()[-1].allocate(4 * MIB, cpu=True)
        outside = np.empty(4 * MIB, "u1")
        kept.pop()
        with bridge.tag("load", limit="10MiB"):
            kept.append(np.empty(6 * MIB, "u1"))
        assert bridge.stats().by("tag")["load"].current_bytes == 10 * MIB
        del outside


def test_limits_of_nested_tags_hold_together() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        with bridge.tag("outer", limit="10MiB"), bridge.tag("inner", limit="6MiB"):
            a = np.empty(4 * MIB, "u1")
            with pytest.raises(MemoryError):
                np.empty(4 * MIB, "u1")
        with bridge.tag("outer", limit="10MiB"), bridge.tag("free"):
            b = np.empty(5 * MIB, "u1")
            with pytest.raises(MemoryError):
                np.empty(2 * MIB, "u1")
            assert native_process.budgets_of(native_process.tag_variable.get()) == [("outer", 10 * MIB, 9 * MIB)]
        del a, b
        with bridge.tag("outer", limit="10MiB"):
            assert native_process.budgets_of(native_process.tag_variable.get()) == [("outer", 10 * MIB, 0)]


def test_resizing_counts_against_the_limit() -> None:
    with bridge.installed("host", frameworks=["numpy"]), bridge.tag("grow", limit="10MiB"):
        array = np.ones(4 * MIB, "u1")
        with pytest.raises(MemoryError):
            array.resize(11 * MIB)
        assert array.nbytes == 4 * MIB and array.all()
        array.resize(9 * MIB)
        array.resize(MIB)
        other = np.empty(9 * MIB, "u1")
        del array, other
        assert native_process.budgets_of(native_process.tag_variable.get()) == [("grow", 10 * MIB, 0)]


def test_a_failed_request_charges_nothing(make_heap: Any) -> None:
    heap = make_heap(settings=PoolSettings(limit_bytes=8 * MIB))
    with bridge.tag("full", limit="1GiB"):
        with pytest.raises(MemoryError, match=r"of at most 8.00 MiB reserved"):
            heap.allocate(64 * MIB)
        assert native_process.budgets_of(native_process.tag_variable.get()) == [("full", 1 << 30, 0)]


def test_a_limit_is_a_size() -> None:
    with pytest.raises(bridge.ConfigError, match="limit='lots' is not a size"):
        bridge.tag("x", limit="lots")
    assert repr(bridge.tag("x", limit=2048)) == "tag('x', limit='2.00 KiB')"


@pytest.mark.parametrize("threshold", ["8MiB", 0, 0.0])
def test_what_is_cached_above_the_threshold_goes_back_by_itself(threshold: Any) -> None:
    with bridge.installed("host", frameworks=["numpy"], release_threshold=threshold):
        arrays = [np.ones(40 * MIB, "u1") for _ in range(4)]
        assert bridge.stats().reserved_bytes >= 160 * MIB
        del arrays
        limit = 8 * MIB if threshold == "8MiB" else 0
        assert eventually(lambda: bridge.stats().cached_bytes <= limit), bridge.stats()


def test_without_a_threshold_the_cache_stays() -> None:
    with bridge.installed("host", frameworks=["numpy"], release_threshold=None):
        del_me = np.ones(40 * MIB, "u1")
        reserved = bridge.stats().reserved_bytes
        del del_me
        other = np.ones(MIB, "u1")
        assert bridge.stats().reserved_bytes >= reserved
        del other
        assert bridge.trim() >= 40 * MIB


def test_live_arrays_keep_their_memory_above_the_threshold() -> None:
    with bridge.installed("host", frameworks=["numpy"], release_threshold=0):
        kept = np.full(40 * MIB, 7, "u1")
        for _ in range(20):
            np.ones(20 * MIB, "u1")
        assert eventually(lambda: bridge.stats().cached_bytes <= 64 * MIB)
        assert (kept == 7).all()


@pytest.mark.parametrize(
    ("value", "said"),
    [("1.5", "fraction between 0.0 and 1.0"), (1.5, "fraction between"), (-0.5, "fraction"), ("x", "not a size")],
)
def test_a_threshold_is_a_size_or_a_fraction(value: Any, said: str) -> None:
    with pytest.raises(bridge.ConfigError, match=said):
        bridge.install("host", release_threshold=value)


@pytest.mark.parametrize("value", ["soon", -1, float("nan"), float("inf"), True, []])
def test_a_time_to_wait_is_a_number_of_seconds_with_an_end(value: Any) -> None:
    with pytest.raises(bridge.ConfigError, match=r"wait_timeout=.* is not a time to wait"):
        bridge.install("host", wait_timeout=value)


def test_a_time_to_wait_comes_from_an_argument_or_the_environment() -> None:
    from rmm_managed_bridge.config import read_config

    environment = {"RMM_BRIDGE_WAIT_TIMEOUT": "2.5"}
    assert read_config(environment={}).settings_for(1000).wait_timeout_ms == 60_000
    assert read_config(environment=environment).settings_for(1000).wait_timeout_ms == 2500
    assert read_config(wait_timeout=0, environment=environment).settings_for(1000).wait_timeout_ms == 0


@pytest.mark.parametrize("value", ["0.5", 0.5, "50%", " 50 % "])
def test_a_fraction_is_one_of_the_memory_there_is(value: Any) -> None:
    from rmm_managed_bridge.config import read_config

    config = read_config(release_threshold=value, environment={})
    assert config.settings_for(1000).release_threshold_bytes == 500
    assert config.settings_for(1000).quarantine_limit_bytes == 250
    assert read_config(maximum_pool_size=4 << 20, environment={}).settings_for(1000).quarantine_limit_bytes == 1 << 20
