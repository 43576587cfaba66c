"""What it costs to hand an array over, and to ask and tell the bridge of one: beside the libraries' own constructors.

python tests/bench/bench_views.py            on a GPU with CuPy, Warp and PyTorch, as far as they are there
python tests/bench/bench_views.py host       on the host backend: Warp and PyTorch on the CPU

Uses at most 1 GiB of managed memory.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from measure import Row, best_ns, print_rows

import rmm_managed_bridge as bridge

SIZE_BYTES = 4096
# Microseconds on an H200's host, views of 4 KiB (docs/design/acceptance.md).
GOALS_US = {"as_cupy": 6.0, "as_numpy": 5.0, "as_torch": 9.0, "as_warp": 7.0}


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def view_row(name: str, source: str, view: Callable[[], object], peer: str, theirs: Callable[[], object]) -> Row:
    """Compare a view with what else there is."""
    return Row(f"{name}({source})", best_ns(view), peer, best_ns(theirs), None)


class Interface:
    """What a library's own constructor takes."""

    def __init__(self, name: str, shown: dict[str, Any]) -> None:
        setattr(self, name, shown)


def own_constructors(x: "np.ndarray[Any, Any]", cupy: Any, warp: Any, torch: Any, device: str) -> dict[str, Any]:
    """How each library makes an array over memory that it is told of, without asking anybody."""
    ptr, shape, strides = x.ctypes.data, x.shape, x.strides
    shown = {"version": 3, "data": (ptr, False), "shape": shape, "strides": None, "typestr": x.dtype.str}
    own = {"as_numpy": lambda: np.asarray(Interface("__array_interface__", shown))}
    if cupy is not None:

        def cupys() -> Any:
            memory = cupy.cuda.UnownedMemory(ptr, SIZE_BYTES, x, 0)
            return cupy.ndarray(shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0), strides=strides)

        own["as_cupy"] = cupys
    if warp is not None:
        own["as_warp"] = lambda: warp.array(ptr=ptr, dtype=warp.float32, shape=shape, device=device)
    if torch is not None and device != "cpu":
        own["as_torch"] = lambda: torch.as_tensor(Interface("__cuda_array_interface__", shown), device=device)
    elif torch is not None:
        own["as_torch"] = lambda: torch.from_numpy(x)
    return own


def view_rows(device: str) -> list[Row]:
    """Return rows of all views there are, each beside the library's own constructor and beside a copy."""
    cupy = imported("cupy") if device != "cpu" else None
    warp, torch = imported("warp"), imported("torch")
    x = np.zeros(SIZE_BYTES // 4, np.float32)
    assert bridge.owns(x)
    makers: dict[str, Callable[[], Any]] = {"numpy": lambda: np.ones(x.shape, x.dtype)}
    synchronize: Callable[[], object] = int
    if cupy is not None:
        makers["cupy"] = lambda: cupy.ones(x.shape, x.dtype)
        synchronize = cupy.cuda.Device().synchronize  # so that nothing is waited for in a view
    if warp is not None and device != "cpu":
        makers["warp"] = lambda: warp.ones(x.shape, dtype=warp.float32, device=device)
    if torch is not None and device != "cpu":
        makers["torch"] = lambda: bridge.as_torch(np.ones(x.shape, x.dtype))
    copies: dict[str, Any] = {}
    if cupy is not None:
        on_device = cupy.ones(x.shape, x.dtype)
        copies = {"as_cupy": lambda: cupy.asarray(x), "as_numpy": lambda: cupy.asnumpy(on_device)}
    if warp is not None:
        copies["as_warp"] = lambda: warp.array(x, dtype=warp.float32, device=device)
    if torch is not None:
        copies["as_torch"] = lambda: torch.tensor(x, device=device)
    own = own_constructors(x, cupy, warp, torch, device)
    rows = []
    for name, constructor in own.items():
        view = getattr(bridge, name)
        for source, make in makers.items():
            if source == name.removeprefix("as_"):
                continue
            # One for each view: an array that another framework used as well is ordered after that one, too.
            array = make()
            synchronize()
            rows.append(view_row(name, source, lambda v=view, a=array: v(a), "its own constructor", constructor))
            if name in copies and source == ("cupy" if name == "as_numpy" else "numpy"):
                rows.append(view_row(name, source, lambda v=view, a=array: v(a), "a copy of it", copies[name]))
    return rows


def call_rows(device: str) -> list[Row]:
    """Return rows of the calls that ask and tell about an array, beside `np.empty` of its size."""
    x = np.ones(SIZE_BYTES // 4, np.float32)

    def tagged() -> None:
        with bridge.tag("bench"):
            pass

    calls: dict[str, Callable[[], object]] = {
        "allocation_of": lambda: bridge.allocation_of(x),
        "owns": lambda: bridge.owns(x),
        "memory_kind": lambda: bridge.memory_kind(x),
        "record_stream(0)": lambda: bridge.record_stream(x, 0),
        "tag": tagged,
        "prefetch": lambda: bridge.prefetch(x, "cpu"),
        "stats": bridge.stats,
    }
    if device == "cpu":
        del calls["record_stream(0)"]
    peer = best_ns(lambda: np.empty(SIZE_BYTES // 4, np.float32))
    return [Row(name, best_ns(call, 500), "np.empty(4 KiB)", peer, None) for name, call in calls.items()]


def print_goals(rows: list[Row]) -> None:
    seen = set()
    for row in rows:
        name = row.work.partition("(")[0]
        if name not in seen and name in GOALS_US:
            seen.add(name)
            verdict = "reached" if row.ours_ns <= GOALS_US[name] * 1e3 else "not reached"
            print(f"{row.work}: {row.ours_ns / 1e3:.1f} us, goal {GOALS_US[name]:.0f} us: {verdict}")


def main(where: str) -> None:
    for name in ("warp", "torch") if where == "host" else ("cupy", "warp", "torch"):
        imported(name)  # before `install`, which hooks those that are there
    if where == "host":
        bridge.install(backend="host")
        device = "cpu"
    else:
        bridge.install(backend="managed", initial_pool_size="512MiB", maximum_pool_size="1GiB")
        device = "cuda:0"
    rows = view_rows(device)
    print_rows(f"Views of {SIZE_BYTES} bytes, {where}", rows)
    if device != "cpu":
        print_goals(rows)
    print_rows(f"Calls about an array of {SIZE_BYTES} bytes, {where}", call_rows(device))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gpu")
