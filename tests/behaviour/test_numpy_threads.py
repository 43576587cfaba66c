"""Many threads allocate, resize and free together, through NumPy and directly: N8."""

import ctypes
import os
import queue
import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.programs import recorded_events

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import pool as native_pool

THREADS = 16
OPERATIONS = int(os.environ.get("BRIDGE_STRESS_STEPS", "5000"))  # 20000 for the long form
LARGEST_LOG2 = 22
EDGE = 512


@dataclass
class Block:
    """Memory that holds a byte of its own everywhere at its edges, and on every page between."""

    owner: Any  # an array, or None for a block of the heap
    ptr: int
    size: int
    value: int

    def write(self) -> None:
        ctypes.memset(self.ptr, self.value, min(self.size, EDGE))
        ctypes.memset(self.ptr + max(self.size - EDGE, 0), self.value, min(self.size, EDGE))
        if isinstance(self.owner, np.ndarray):
            self.owner[::4096] = self.value

    def holds(self, size: int, *, end: bool) -> bool:
        """Tell whether the first `size` bytes, and their last ones if `end`, hold what was written."""
        edge = min(size, EDGE)
        expected = bytes([self.value]) * edge
        good = ctypes.string_at(self.ptr, edge) == expected
        good = good and (not end or ctypes.string_at(self.ptr + size - edge, edge) == expected)
        # `tobytes` of a view, since a comparison would allocate arrays of its own
        return good and (self.owner is None or not self.owner[:size:4096].tobytes().strip(expected[:1]))


class Worker:
    """One thread's share."""

    def __init__(self, seed: int, heap: native_pool.Pool, handed_over: "queue.SimpleQueue[Block]") -> None:
        self.random = random.Random(seed)
        self.heap = heap
        self.handed_over = handed_over
        self.mine: list[Block] = []
        self.failures: list[str] = []
        self.from_others = 0

    def size(self) -> int:
        return int(2 ** self.random.uniform(0, LARGEST_LOG2))

    def allocate(self) -> None:
        size, value = self.size(), self.random.randrange(1, 256)
        if self.random.random() < 0.5:
            array = np.empty(size, "u1")
            block = Block(array, array.ctypes.data, size, value)
        else:
            block = Block(None, self.heap.allocate(size, cpu=True), size, value)
        block.write()
        self.mine.append(block)

    def resize(self, block: Block) -> None:
        if block.owner is None:
            return
        self.check(block)
        size = self.size()
        block.owner.resize(size, refcheck=False)
        block.ptr = block.owner.ctypes.data
        if not block.holds(min(block.size, size), end=size >= block.size):
            self.failures.append(f"contents lost from {block.size} to {size} bytes")
        block.size = size
        block.write()

    def check(self, block: Block) -> None:
        if not block.holds(block.size, end=True):
            self.failures.append(f"{block.size} bytes at {block.ptr:#x} changed")

    def free(self, block: Block) -> None:
        self.check(block)
        if block.owner is None:
            self.heap.deallocate(block.ptr, block.size)
        block.owner = None

    def step(self) -> None:
        choice = self.random.random()
        if not self.mine or (len(self.mine) < 4 and choice < 0.5):
            self.allocate()
        elif choice < 0.7:
            self.resize(self.random.choice(self.mine))
        elif choice < 0.85:
            self.free(self.mine.pop(self.random.randrange(len(self.mine))))
        else:
            self.handed_over.put(self.mine.pop(self.random.randrange(len(self.mine))))
            try:
                self.free(self.handed_over.get_nowait())
                self.from_others += 1
            except queue.Empty:
                pass

    def run(self) -> None:
        try:
            for _ in range(OPERATIONS):
                self.step()
            for block in self.mine:
                self.free(block)
        except BaseException as error:  # reported by the test
            self.failures.append(repr(error))


@pytest.mark.behaviour("N8")
def test_sixteen_threads_allocate_resize_and_free_each_others_blocks(host_heap: Any) -> None:
    handed_over: queue.SimpleQueue[Block] = queue.SimpleQueue()
    with (
        bridge.installed("host", frameworks=["numpy"], numpy_scope="process", track="counters"),
        recorded_events(THREADS * OPERATIONS * 8),
    ):
        before, dropped_count = bridge.stats(), bridge.history().dropped_count
        workers = [Worker(seed, host_heap, handed_over) for seed in range(THREADS)]
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while not handed_over.empty():
            workers[0].free(handed_over.get())
        after = bridge.stats()
        history = bridge.history()
        events = [event.action for event in history]
    assert [failure for worker in workers for failure in worker.failures] == []
    assert sum(worker.from_others for worker in workers) > 1000
    assert history.dropped_count == dropped_count
    assert events.count("allocate") == events.count("deallocate") == after.total_count - before.total_count
    assert events.count("resize") > 1000
    assert (after.current_bytes, after.current_count) == (before.current_bytes, before.current_count)
    assert (after.foreign_frees, after.size_mismatches) == (before.foreign_frees, before.size_mismatches)
