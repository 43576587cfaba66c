"""Random programs against a model: the ledger's totals, the blocks' addresses, and what NumPy's resize keeps."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler
from rmm_managed_bridge._native import pool as native_pool

MIB = 1 << 20
SIZES = st.one_of(
    st.integers(1, 600),
    st.integers(1, 70_000),
    st.builds(lambda power, off: max((1 << power) + off, 1), st.integers(6, 22), st.integers(-1, 1)),
)
TAGS = st.sampled_from(["", "model-a", "model-b"])
FRAMEWORKS = st.sampled_from(["numpy", "cupy", "warp", "model"])


class Block:
    """What the model knows of a live block; its bytes hold `mark`."""

    def __init__(self, ptr: int, size: int, tag: str, framework: str, alignment: int) -> None:
        self.ptr, self.size, self.tag, self.framework, self.alignment = ptr, size, tag, framework, alignment
        self.mark = 0
        self.resized_count = 0


class Ledger(RuleBasedStateMachine):
    """Allocate, resize and free on one host heap; after every step all reports agree with the model."""

    blocks: Bundle[Block] = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.heap = native_pool.host_pool()
        self.handler = numpy_handler.NumpyHandler()
        self.handler.use(self.heap)
        self.live: dict[int, Block] = {}
        self.start = bridge.stats()
        self.total_bytes = self.total_count = 0
        self.next_mark = 1
        self.highest = 0
        bridge.reset_peak()

    @rule(target=blocks, size=SIZES, tag=TAGS, framework=FRAMEWORKS, power=st.integers(0, 18), cpu=st.booleans())
    def allocate(self, size: int, tag: str, framework: str, power: int, cpu: bool) -> Block:
        alignment = 1 << power
        if tag:
            with bridge.tag(tag):
                ptr = self.heap.allocate(size, framework=framework, alignment=alignment, cpu=cpu)
        else:
            ptr = self.heap.allocate(size, framework=framework, alignment=alignment, cpu=cpu)
        return self._add(Block(ptr, size, tag, framework, max(alignment, 64)))

    @rule(target=blocks, size=SIZES, zeros=st.booleans())
    def allocate_as_numpy(self, size: int, zeros: bool) -> Block:
        ptr = self.handler.calloc(size, 1) if zeros else self.handler.malloc(size)
        if zeros:
            assert not _bytes(ptr, size).any()
        return self._add(Block(ptr, size, "", "numpy", 64))

    @rule(target=blocks, block=consumes(blocks), size=SIZES)
    def resize(self, block: Block, size: int) -> Block:
        kept = min(size, block.size)
        del self.live[block.ptr]
        block.ptr = self.handler.realloc(block.ptr, size)
        assert (_bytes(block.ptr, kept) == block.mark).all()
        self.total_bytes += max(size - block.size, 0)
        block.size, block.alignment = size, 64
        block.resized_count += 1
        self._fill(block)
        return block

    @rule(block=consumes(blocks), as_numpy=st.booleans())
    def free(self, block: Block, as_numpy: bool) -> None:
        assert (_bytes(block.ptr, block.size) == block.mark).all()
        if as_numpy:
            self.handler.free(block.ptr)
        else:
            self.heap.deallocate(block.ptr, block.size)
        del self.live[block.ptr]

    @rule()
    def trim(self) -> None:
        bridge.trim()

    def _add(self, block: Block) -> Block:
        assert block.ptr
        self.total_bytes += block.size
        self.total_count += 1
        self._fill(block)
        return block

    def _fill(self, block: Block) -> None:
        assert block.ptr not in self.live
        assert block.ptr % block.alignment == 0
        self.live[block.ptr] = block
        block.mark = self.next_mark = self.next_mark % 255 + 1
        _bytes(block.ptr, block.size)[:] = block.mark
        self.highest = max(self.highest, sum(each.size for each in self.live.values()))

    @invariant()
    def blocks_do_not_overlap(self) -> None:
        ends = sorted((block.ptr, block.ptr + block.size) for block in self.live.values())
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))

    @invariant()
    def the_snapshot_is_the_model(self) -> None:
        snapshot = bridge.snapshot()
        found = {each.ptr: each for each in snapshot}
        assert found.keys() == self.live.keys()
        for ptr, block in self.live.items():
            record = found[ptr]
            assert (record.requested_bytes, record.tag, record.framework) == (block.size, block.tag, block.framework)
            assert record.resized_count == block.resized_count
            assert bridge.allocation_of(ptr + block.size - 1) == record
        size_bytes = sum(block.size for block in self.live.values())
        assert snapshot.current_bytes == size_bytes
        for key, name in (("tag", "tag"), ("framework", "framework")):
            expected: Counter[str] = Counter()
            for block in self.live.values():
                expected[getattr(block, name)] += block.size
            assert snapshot.by(key) == dict(expected)  # type: ignore[arg-type]
        for key in ("device", "kind", "site"):
            assert sum(snapshot.by(key).values()) == size_bytes  # type: ignore[arg-type]

    @invariant()
    def the_counters_are_the_model(self) -> None:
        stats = bridge.stats()
        size_bytes = sum(block.size for block in self.live.values())
        assert (stats.current_bytes, stats.current_count) == (size_bytes, len(self.live))
        assert (self.heap.live_bytes, self.heap.live_count) == (size_bytes, len(self.live))
        assert stats.total_count - self.start.total_count == self.total_count
        assert stats.peak_bytes == self.highest
        for key in ("framework", "tag", "site", "device", "kind"):
            usages = stats.by(key).values()  # type: ignore[arg-type]
            assert sum(usage.current_bytes for usage in usages) == size_bytes
            assert all(usage.peak_bytes >= usage.current_bytes >= 0 for usage in usages)
        assert (stats.foreign_frees, stats.size_mismatches) == (self.start.foreign_frees, self.start.size_mismatches)
        assert stats.reserved_bytes >= size_bytes + stats.cached_bytes
        peak = bridge.snapshot().peak
        assert sum(peak.by("tag").values()) == peak.current_bytes == self.highest

    def teardown(self) -> None:
        for ptr in list(self.live):
            self.heap.deallocate(ptr)
        self.handler.use(None)
        assert self.heap.live_count == 0
        assert self.heap.retire()


def _bytes(ptr: int, size: int) -> Any:
    """Return the memory at `ptr` as an array that holds on to nothing."""
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * size).from_address(ptr))


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=8), st.sampled_from(["u1", "i4", "f8", "c16", "O"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numpys_resize_keeps_what_fits_and_zeroes_the_rest(sizes: list[int], dtype: str) -> None:
    if dtype == "O":
        sizes = [size % 2_000 for size in sizes]
    with bridge.installed("host", frameworks=["numpy"]):
        array = np.zeros(0, dtype)
        for size in sizes:
            before = array.copy()
            array.resize(size, refcheck=False)
            kept = min(len(before), size)
            assert (array[:kept] == before[:kept]).all()
            assert not array[kept:].any()
            array[:] = np.arange(1, size + 1) % 100 + 1
            record = bridge.allocation_of(array.ctypes.data)
            assert record is not None
            assert record.requested_bytes == max(array.nbytes, 1)
        del array, before
        assert bridge.stats().current_count == 0
