"""Whole programs, as people write them. `bench_programs.py` runs each with the bridge and without, in a process each.

python tests/bench/programs_of.py NAME bridge|without

prints one line of JSON: the time, and the most memory that was resident and taken of the card meanwhile.
"""

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20


def appending() -> None:
    """An array of 128 MiB that grows by `np.append`, half a MiB at a time."""
    array = np.empty(0)
    piece = np.ones(MIB // 16)
    for _ in range(256):
        array = np.append(array, piece)
    assert array[-1] == 1


def image_pipeline() -> None:
    """Forty pictures of 12 megapixels, blurred, sharpened, scaled and cut."""
    picture = np.random.default_rng(1).random((3000, 4000), "f4")
    for _ in range(40):
        blurred = picture.copy()
        for axis in (0, 1):
            blurred = (np.roll(blurred, 1, axis) + blurred + np.roll(blurred, -1, axis)) / 3
        sharp = np.clip(picture + 0.5 * (picture - blurred), 0, 1)
        small = sharp.reshape(1500, 2, 2000, 2).mean(axis=(1, 3))
        thumbnail = (small[::8, ::8] * 255).astype("u1")
    assert thumbnail.any()


def data_frame() -> None:
    """Two million rows joined, grouped and sorted, and a frame that grows by `pandas.concat`."""
    import pandas as pd

    rng = np.random.default_rng(1)
    count = 2_000_000
    frame = pd.DataFrame({"key": rng.integers(0, 50_000, count), "a": rng.random(count), "b": rng.random(count)})
    names = pd.DataFrame({"key": np.arange(50_000), "weight": rng.random(50_000)})
    for _ in range(3):
        joined = frame.merge(names, on="key")
        joined["score"] = joined.a * joined.weight + joined.b
        top = joined.groupby("key").agg({"score": "mean", "a": "sum"}).sort_values("score")
    grown = frame.head(0)
    for start in range(0, count, count // 40):
        grown = pd.concat([grown, frame.iloc[start : start + count // 40]])
    assert len(grown) == count and len(top) > 0


def simulation() -> None:
    """A wave on a grid of 2,000 x 2,000 for 150 steps, each with its temporaries."""
    now = np.zeros((2000, 2000))
    now[900:1100, 900:1100] = 1
    before = now.copy()
    for _ in range(150):
        bend = now[:-2, 1:-1] + now[2:, 1:-1] + now[1:-1, :-2] + now[1:-1, 2:] - 4 * now[1:-1, 1:-1]
        then = now.copy()
        then[1:-1, 1:-1] = 2 * now[1:-1, 1:-1] - before[1:-1, 1:-1] + 0.2 * bend
        before, now = now, then
    assert np.isfinite(now).all()


def training_loop() -> None:
    """NumPy data, preprocessed by CuPy where there is a GPU, and a small network of PyTorch."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    xp: Any = np
    if on_gpu:
        import cupy as xp
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).to(device)
    step = torch.optim.SGD(network.parameters(), lr=0.01)
    rng = np.random.default_rng(1)
    for _ in range(60):
        data, wanted = rng.random((8192, 256), "f4"), rng.integers(0, 10, 8192)
        batch = xp.asarray(data)
        batch = (batch - batch.mean(axis=0)) / (batch.std(axis=0) + 1e-6)
        inputs = torch.from_dlpack(batch) if on_gpu else torch.from_numpy(batch)
        loss = torch.nn.functional.cross_entropy(network(inputs), torch.from_numpy(wanted).to(device))
        step.zero_grad()
        loss.backward()
        step.step()
    assert np.isfinite(loss.item())


def three_frameworks_in_turn() -> None:
    """CuPy, PyTorch and Warp, each with 512 MiB at most, one after the other and again."""
    import cupy as cp
    import torch
    import warp as wp

    count = 32 * MIB
    for _ in range(5):
        for _ in range(4):
            ones = cp.ones(count, "f4")
            total = ones * 2 + ones
        assert float(total[-1]) == 3
        del ones, total
        for _ in range(4):
            tensor = torch.ones(count, device="cuda")
            sums = tensor * 2 + tensor
        assert float(sums[-1]) == 3
        del tensor, sums
        arrays = [wp.full(count, 3.0, dtype=wp.float32, device="cuda") for _ in range(4)]
        wp.synchronize()
        del arrays


PROGRAMS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "appending": (appending, ()),
    "image pipeline": (image_pipeline, ()),
    "data frame": (data_frame, ("pandas",)),
    "simulation": (simulation, ()),
    "training loop": (training_loop, ("torch",)),
    "three frameworks in turn": (three_frameworks_in_turn, ("gpu", "cupy", "torch", "warp")),
}
"""Each with what it needs."""


def has_gpu() -> bool:
    from rmm_managed_bridge import machine

    return machine.load_driver()[0] > 0


def missing(name: str) -> list[str]:
    """Return what the program `name` needs and is not here."""
    return [
        need
        for need in PROGRAMS[name][1]
        if (not has_gpu() if need == "gpu" else importlib.util.find_spec(need) is None)
    ]


class Watch:
    """The most memory since it began: resident by the kernel's own mark, of the card by looking often."""

    def __init__(self) -> None:
        self._card = _card_bytes() if has_gpu() else None
        self.start_resident_bytes = _status_bytes("VmRSS")
        self.card_bytes = 0
        # The kernel's high-water mark then starts again from here.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._ended = threading.Event()
        self._looks = threading.Thread(target=self._look, daemon=True)
        if self._card is not None:
            self._looks.start()

    def _look(self) -> None:
        assert self._card is not None
        while not self._ended.wait(0.002):
            self.card_bytes = max(self.card_bytes, _card_bytes() - self._card)

    def end(self) -> dict[str, int]:
        self._ended.set()
        if self._card is not None:
            self._looks.join()
        return {
            "resident_bytes": _status_bytes("VmHWM") - self.start_resident_bytes,
            "left_bytes": _status_bytes("VmRSS") - self.start_resident_bytes,
            "card_bytes": self.card_bytes,
        }


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def _card_bytes() -> int:
    """What is taken of the card, by everybody: the machine is ours while this runs."""
    import cupy

    free, whole = cupy.cuda.runtime.memGetInfo()
    return int(whole - free)


def run(name: str, *, with_bridge: bool) -> dict[str, float]:
    """Run a program and return its figures."""
    program, needs = PROGRAMS[name]
    for need in needs:
        if need != "gpu":
            importlib.import_module(need)
    if with_bridge:
        import rmm_managed_bridge as bridge

        bridge.install()
    watch = Watch()
    start = time.perf_counter()
    program()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, **watch.end()}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], with_bridge=sys.argv[2] == "bridge")))
