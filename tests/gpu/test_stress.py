"""All libraries at once, behind kernels that are slow on purpose: every block keeps its pattern until it is let go.

For as long as BRIDGE_STRESS_SECONDS says.
"""

import os
import threading
import time

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]
SECONDS = float(os.environ.get("BRIDGE_STRESS_SECONDS", "5"))
CLOCKS = 2_000_000  # a millisecond
ROUNDS = 5_000  # of a sine: about a millisecond


class Worker:
    """One thread with streams of its own. `problems` has what was found wrong."""

    def __init__(self, bridge, cupy, warp, slow, spin, seed: int, problems: list[str]) -> None:
        self.bridge, self.cupy, self.warp, self.slow, self.spin = bridge, cupy, warp, slow, spin
        self.random = np.random.default_rng(seed)
        self.seed, self.problems, self.steps = seed, problems, 0

    def run(self, until: float) -> None:
        self.cupy.cuda.Device(0).use()
        self.streams = [self.cupy.cuda.Stream(non_blocking=bool(number % 2)) for number in range(3)]
        self.side, self.event = self.warp.Stream("cuda:0"), self.warp.Event("cuda:0")
        ways = [
            self.numpy_to_kernel,
            self.kernel_to_numpy,
            self.invisible_copy,
            self.warp_to_numpy,
            self.warp_spins,
            self.warp_spins_aside,
            self.steal,
        ]
        while time.monotonic() < until and not self.problems:
            value = np.float32(self.seed * 100_000 + self.steps % 100_000)
            size = int(2 ** self.random.uniform(4, 19))
            ways[self.steps % len(ways)](size, value, self.streams[self.steps // len(ways) % 3])
            if self.steps % 50 == 49:
                self.streams[self.steps % 3] = self.cupy.cuda.Stream(non_blocking=bool(self.steps % 2))
            if self.steps % 101 == 100:
                self.bridge.trim()
            self.steps += 1

    def check(self, array, value: np.float32, what: str) -> None:
        if not (array == value).all():
            self.problems.append(f"thread {self.seed}, step {self.steps}: {what}")

    def numpy_to_kernel(self, size: int, value: np.float32, stream) -> None:
        with stream:
            host = np.full(size, value, "f4")
            device = self.bridge.as_cupy(host)
            result = self.cupy.empty(size, "f4")
            self.slow.copy(device, result, clocks=CLOCKS)
            del host, device
            np.full(size, -1, "f4")
            self.check(self.bridge.as_numpy(result), value, "a NumPy block was used again under a kernel")

    def kernel_to_numpy(self, size: int, value: np.float32, stream) -> None:
        with stream:
            x = self.cupy.empty(size, "f4")
            self.slow.fill(x, value, clocks=CLOCKS)
            y = x.copy()
            del x
            self.check(self.bridge.as_numpy(y), value, "a CuPy block was used again on another stream")

    def invisible_copy(self, size: int, value: np.float32, stream) -> None:
        with stream:
            target = self.cupy.empty(size, "f4")
            self.slow.fill(target, -2, clocks=CLOCKS)
            host = np.full(size, value, "f4")
            self.cupy.cuda.runtime.memcpyAsync(target.data.ptr, host.ctypes.data, host.nbytes, 4, stream.ptr)
            del host
            for _ in range(5):
                np.full(size, -3, "f4")
            stream.synchronize()
            self.check(self.cupy.asnumpy(target), value, "the source of a copy was used again")

    def warp_to_numpy(self, size: int, value: np.float32, stream) -> None:
        x = self.warp.full(size, float(value), dtype=self.warp.float32, device="cuda:0")
        y = self.warp.clone(x)
        del x
        self.check(self.bridge.as_numpy(y), value, "a Warp block changed")

    def warp_spins(self, size: int, value: np.float32, stream) -> None:
        """On Warp's own stream: with a block of Warp's, and with one that it was shown."""
        x = self.warp.empty(size, dtype=self.warp.float32, device="cuda:0")
        self.warp.launch(self.spin, size, inputs=[ROUNDS, x, float(value)], device="cuda:0")
        y = self.warp.clone(x)
        del x
        host = np.full(size, -5, "f4")
        shown = self.bridge.as_warp(host)
        self.warp.launch(self.spin, size, inputs=[ROUNDS, shown, -6.0], device="cuda:0")
        del host, shown
        with stream:
            others = [np.full(size, value, "f4"), self.cupy.full(size, value, "f4")]
        self.check(self.bridge.as_numpy(y), value, "a Warp block was used again under a kernel of Warp's")
        self.warp.synchronize_stream("cuda:0")
        for other in others:
            self.check(self.bridge.as_numpy(other), value, "a block that Warp was shown was used again too early")

    def warp_spins_aside(self, size: int, value: np.float32, stream) -> None:
        """On a stream that the bridge knows by `record_stream` alone."""
        host = np.full(size, -7, "f4")
        shown = self.bridge.as_warp(host)
        self.bridge.record_stream(shown, self.side)
        self.warp.launch(self.spin, size, inputs=[ROUNDS, shown, -8.0], stream=self.side)
        x = self.warp.full(size, -9.0, dtype=self.warp.float32, device="cuda:0")
        self.bridge.record_stream(x, self.side)
        self.side.wait_stream(self.warp.get_stream("cuda:0"), self.event)  # which fills it
        self.warp.launch(self.spin, size, inputs=[ROUNDS, x, -10.0], stream=self.side)
        del host, shown, x
        with stream:
            others = [np.full(size, value, "f4"), self.cupy.full(size, value, "f4")]
        others.append(self.warp.full(size, float(value), dtype=self.warp.float32, device="cuda:0"))
        self.warp.synchronize_stream(self.side)
        for other in others:
            self.check(self.bridge.as_numpy(other), value, "a block on a recorded stream was used again too early")

    def steal(self, size: int, value: np.float32, stream) -> None:
        with self.streams[0]:
            x = self.cupy.empty(size, "f4")
            self.slow.fill(x, -4, clocks=CLOCKS)
            del x
        with self.streams[1]:
            y = self.cupy.full(size, value, "f4")
            self.slow.copy(y, y, clocks=CLOCKS)
        self.check(self.bridge.as_numpy(y), value, "a stolen block was written by its last owner")


@pytest.fixture(scope="session")
def spin(warp):
    """The kernel, from before the bridge is installed: Warp keeps small NumPy arrays of what it makes of its source."""
    from helpers import warp_kernels

    return warp_kernels.spin_then_fill


def test_every_pattern_survives(spin, bridge, cupy, warp, slow) -> None:
    problems: list[str] = []
    # Warp sets a device up, compiles and loads at the first use, which is not for several threads at once.
    first = warp.zeros(1, dtype=warp.float32, device="cuda:0")
    warp.launch(spin, 1, inputs=[1, first, 1.0], device="cuda:0")
    workers = [Worker(bridge, cupy, warp, slow, spin, seed, problems) for seed in range(4)]
    until = time.monotonic() + SECONDS
    threads = [threading.Thread(target=worker.run, args=(until,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert min(worker.steps for worker in workers) > 10
    print(f"{sum(worker.steps for worker in workers)} steps in {SECONDS:.0f} s")
