"""Advice about huge pages: only for large blocks of host memory, and never left behind: A3."""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rmm_managed_bridge as bridge
from rmm_managed_bridge import Hints, machine
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge._native import process as native_process

MIB = 1 << 20
HUGE = 2 * MIB
GRANULE = MIB // 4
MADVISE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
MADV_HUGEPAGE, MADV_NOHUGEPAGE = 14, 15

pytestmark = pytest.mark.behaviour("A3")


class Kernel:
    """Stands for the kernel: notes every call, knows which huge pages carry advice, and fails if told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []
        self.advised: set[int] = set()
        self.refused: set[int] = set()  # where the newest call failed: all blocks of a slab live with what was there
        self.failing_calls = 0

    def madvise(self, start: int, size_bytes: int, advice: int) -> int:
        assert advice in (MADV_HUGEPAGE, MADV_NOHUGEPAGE)
        assert start % HUGE == size_bytes % HUGE == 0, "not whole huge pages"
        self.calls.append((start, size_bytes, advice == MADV_HUGEPAGE))
        pages = range(start, start + size_bytes, HUGE)
        if self.failing_calls > 0:
            self.failing_calls -= 1
            self.refused.update(pages)
            return -1
        self.refused.difference_update(pages)
        if advice == MADV_HUGEPAGE:
            self.advised.update(pages)
        else:
            self.advised.difference_update(pages)
        return 0

    def forget_unmapped(self) -> None:
        """What went back took its advice along, and a page of which a part went is no huge page."""
        for pages in (self.advised, self.refused):
            for page in list(pages):
                if any(native_pool.pool_containing(at) is None for at in range(page, page + HUGE, GRANULE)):
                    pages.discard(page)

    def is_advised(self, start: int, size_bytes: int, *, but: Set[int] = frozenset()) -> bool:
        """Return True if any page that the range reaches into carries advice, those in `but` left out."""
        return any(page in self.advised - but for page in range(start // HUGE * HUGE, start + size_bytes, HUGE))


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    entry = MADVISE(kernel.madvise)
    address = ctypes.cast(entry, ctypes.c_void_p).value
    assert address is not None
    native_process.ask_instead_of_madvise(address)
    yield kernel
    native_process.ask_instead_of_madvise(0)


@pytest.fixture
def set_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None, str | None], None]:
    """Return ``set_kernel(setting, numpy_variable)``."""

    def put(setting: str | None, variable: str | None = None) -> None:
        file = tmp_path / "enabled"
        if setting is not None:
            words = [f"[{word}]" if word == setting else word for word in ("always", "madvise", "never")]
            file.write_text(" ".join(words), encoding="ascii")
        monkeypatch.setattr(machine, "_HUGEPAGES_SETTING", file)
        monkeypatch.delenv("NUMPY_MADVISE_HUGEPAGE", raising=False)
        if variable is not None:
            monkeypatch.setenv("NUMPY_MADVISE_HUGEPAGE", variable)

    return put


@pytest.mark.parametrize("setting", ["always", "madvise", "never", None])
@pytest.mark.parametrize("variable", [None, "0", "1"])
@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_blocks_of_4_mib_or_more_are_advised_where_the_mode_says_so(
    kernel: Kernel, set_kernel: Any, setting: str | None, variable: str | None, mode: str
) -> None:
    set_kernel(setting, variable)
    advises = mode == "always" or (mode == "auto" and setting == "madvise" and variable != "0")
    before = bridge.stats().hugepages
    with bridge.installed("host", frameworks=["numpy"], hugepages=mode):
        assert bridge.status().hugepages == bridge.stats().hugepages.mode == mode
        arrays = [np.empty(size * MIB, "u1") for size in (1, 4, 64)]
        ranges = [(array.ctypes.data, array.nbytes) for array in arrays]
        asked = [call for call in kernel.calls if call[2]]
        assert len(asked) == (2 if advises else 0)
        for start, size_bytes, _ in asked:
            assert any(ptr <= start and start + size_bytes <= ptr + size for ptr, size in ranges[1:])
        assert not kernel.is_advised(*ranges[0])
        assert (ranges[2][0] in kernel.advised) == advises
        if mode == "never":
            assert kernel.calls == []
        now = bridge.stats().hugepages
        assert now.advised_bytes - before.advised_bytes == len(kernel.advised) * HUGE
        assert (now.call_count - before.call_count, now.failure_count) == (len(kernel.calls), before.failure_count)
        del arrays
    bridge.trim()
    assert bridge.stats().hugepages == (
        "never",
        before.advised_bytes,
        before.call_count + len(kernel.calls),
        before.failure_count,
    )


@pytest.mark.parametrize("mode", ["always", "never"])
def test_hints_say_it_as_the_argument_does(kernel: Kernel, set_kernel: Any, mode: str) -> None:
    set_kernel("never" if mode == "always" else "madvise")  # where the default would do the opposite
    with (
        pytest.warns(bridge.BridgeWarning, match="no effect on the host backend"),
        bridge.installed("host", frameworks=["numpy"], hints=Hints("device", hugepages=mode)),
    ):
        assert bridge.status().hugepages == bridge.stats().hugepages.mode == mode
        assert bridge.status().hints == "device from 1.00 MiB", "what it says of huge pages is said once"
        array = np.empty(8 * MIB, "u1")
        assert kernel.is_advised(array.ctypes.data, array.nbytes) == (mode == "always")
        del array


def test_hints_and_the_argument_may_agree_and_a_second_install_may_repeat_either(kernel: Kernel) -> None:
    with (
        pytest.warns(bridge.BridgeWarning, match="no effect on the host backend"),
        bridge.installed("host", frameworks=[], hints=Hints("device", hugepages="always"), hugepages="always"),
    ):
        for again in (
            {"hints": "device"},
            {"hints": Hints("device", hugepages="always")},
            {"hugepages": "always"},
            {"hints": "device", "hugepages": "always"},
        ):
            bridge.install(frameworks=[], **again)
        for other in ({"hints": Hints("device", hugepages="never")}, {"hugepages": "never"}):
            with pytest.raises(bridge.InstallError, match="hugepages='never' \\(is 'always'\\)"):
                bridge.install(frameworks=[], **other)
        with pytest.raises(bridge.InstallError, match="hints="):
            bridge.install(frameworks=[], hints=Hints(hugepages="always"))


def test_a_block_that_comes_back_costs_no_second_call(kernel: Kernel, make_heap: Any) -> None:
    heap = make_heap(hugepages=True)
    first = heap.allocate(8 * MIB, cpu=True)
    for _ in range(10):
        heap.deallocate(first)
        assert heap.allocate(8 * MIB, cpu=True) == first
    heap.deallocate(first)
    again = heap.allocate(4 * MIB, cpu=True)  # cut out of memory that carries the advice already
    assert again == first
    assert len(kernel.calls) == 1
    heap.deallocate(again)


def test_advice_ends_where_small_blocks_and_upstream_get_the_memory(kernel: Kernel, make_heap: Any) -> None:
    heap = make_heap(hugepages=True)
    before = bridge.stats().hugepages.advised_bytes
    large = heap.allocate(64 * MIB, cpu=True)
    assert kernel.is_advised(large, 64 * MIB)
    heap.deallocate(large)
    small = [heap.allocate(1 * MIB, cpu=True) for _ in range(16)] + [heap.allocate(3 * MIB, cpu=True)]
    assert all(large <= ptr < large + 64 * MIB for ptr in small)
    assert not any(kernel.is_advised(ptr, MIB) for ptr in small)
    assert kernel.advised, "the rest is as it was"
    for ptr in small:
        heap.deallocate(ptr)
    heap.trim()
    assert bridge.stats().hugepages.advised_bytes == before, "what goes back takes its advice along"


def test_ten_failing_calls_are_counted_and_break_nothing(kernel: Kernel) -> None:
    before = bridge.stats().hugepages
    kernel.failing_calls = 10
    with bridge.installed("host", frameworks=["numpy"], hugepages="always"):
        for _ in range(10):
            assert np.ones(8 * MIB, "u1").all()
        now = bridge.stats().hugepages
        assert now.failure_count - before.failure_count == now.call_count - before.call_count == 10
        assert now.advised_bytes == before.advised_bytes
        array = np.ones(8 * MIB, "u1")
        assert kernel.is_advised(array.ctypes.data, array.nbytes)
        assert bridge.stats().hugepages.advised_bytes - before.advised_bytes == 8 * MIB
        del array


def test_advice_whose_end_failed_is_ended_later(kernel: Kernel, make_heap: Any) -> None:
    heap = make_heap(hugepages=True)
    heap.deallocate(heap.allocate(4 * MIB, cpu=True))
    kernel.failing_calls = 1
    small = heap.allocate(3 * MIB, cpu=True)
    assert kernel.is_advised(small, 3 * MIB)
    heap.deallocate(small)
    small = heap.allocate(3 * MIB, cpu=True)
    assert not kernel.is_advised(small, 3 * MIB)
    heap.deallocate(small)


def test_growing_and_device_blocks(kernel: Kernel, make_heap: Any) -> None:
    heap = make_heap(hugepages=True)
    device = heap.allocate(8 * MIB)
    assert kernel.calls == []
    heap.deallocate(device)
    with bridge.installed("host", frameworks=["numpy"], hugepages="always"):
        array = np.ones(1000, "u1")
        array.resize(8 * MIB, refcheck=False)
        assert kernel.is_advised(array.ctypes.data, array.nbytes)
        array.resize(1000, refcheck=False)
        assert not kernel.is_advised(array.ctypes.data, array.nbytes)
        del array


def flags_of(ptr: int) -> list[str]:
    """Return the kernel's VmFlags of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= ptr < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"{ptr:#x} is not mapped")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the kernel has no huge pages")
@pytest.mark.parametrize("advised", [False, True])
def test_the_real_kernel_takes_the_advice_and_its_end(make_heap: Any, advised: bool) -> None:
    heap = make_heap(hugepages=advised)
    ptr = heap.allocate(64 * MIB, cpu=True)
    assert ptr % HUGE == 0
    assert ("hg" in flags_of(ptr)) is advised
    heap.deallocate(ptr)
    small = heap.allocate(1000, cpu=True)
    assert "hg" not in flags_of(small)
    heap.deallocate(small)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from([1000, 1 * MIB, 3 * MIB, 4 * MIB, 5 * MIB + 300_000, 17 * MIB, 0]), st.integers(0, 100)),
    max_size=40,
)


@settings(deadline=None)
@example(operations=[(17 * MIB, 0), *[(1000, 0)] * 4, (0, 0), *[(1 * MIB, 0)] * 2], failing={6})
@given(operations=OPERATIONS, failing=st.sets(st.integers(0, 40), max_size=5))
def test_whatever_is_allocated_and_freed_no_small_block_carries_advice(
    operations: list[tuple[int, int]], failing: set[int]
) -> None:
    """Failures excepted, large blocks have it on all their whole pages, and the count is right."""
    kernel = Kernel()
    entry = MADVISE(kernel.madvise)
    native_process.ask_instead_of_madvise(ctypes.cast(entry, ctypes.c_void_p).value or 0)
    heap = native_pool.host_pool(hugepages=True)
    before = bridge.stats().hugepages
    live: list[tuple[int, int]] = []
    try:
        for step, (size, choice) in enumerate(operations):
            if size == 0 and live:
                heap.deallocate(live.pop(choice % len(live))[0])
                continue
            if size == 0:
                heap.trim()
                kernel.forget_unmapped()
                continue
            kernel.failing_calls = int(step in failing)
            ptr = heap.allocate(size, cpu=True)
            live.append((ptr, size))
            kernel.failing_calls = 0
            whole = range((ptr + HUGE - 1) // HUGE * HUGE, (ptr + size) // HUGE * HUGE, HUGE)
            if size >= 4 * MIB:
                assert (kernel.advised | kernel.refused).issuperset(whole)
            else:
                assert not kernel.is_advised(ptr, size, but=kernel.refused)
        if not failing:
            assert bridge.stats().hugepages.advised_bytes - before.advised_bytes == len(kernel.advised) * HUGE
    finally:
        for ptr, _ in live:
            heap.deallocate(ptr)
        assert heap.retire()
        native_process.ask_instead_of_madvise(0)
    assert failing or bridge.stats().hugepages.advised_bytes == before.advised_bytes
