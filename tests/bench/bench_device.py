"""The pool against its peers on a GPU, in one run: RMM's pools, CuPy's pool, Warp's mempool, NumPy's own memory.

python tests/bench/bench_device.py        needs a GPU, CuPy and Warp; uses at most 2 GiB of managed memory
"""

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import rmm
import warp

sys.path.insert(0, str(Path(__file__).parent))
from measure import Row, best_ns, print_rows
from sides import side_rows

import rmm_managed_bridge as bridge

ROUNDS = 4
POOL = {"pool_allocator": True, "managed_memory": True, "initial_pool_size": "1GiB", "maximum_pool_size": "2GiB"}


def pair(resource: Any, stream: Any, size_bytes: int = 1024) -> Any:
    return lambda: resource.deallocate(resource.allocate(size_bytes, stream), size_bytes, stream)


def new_stream() -> Any:
    return rmm.pylibrmm.stream.Stream(obj=cupy.cuda.Stream(non_blocking=True))


def fragment(resource: Any, stream: Any, live: int, free: int) -> list[int]:
    """Leave `live` blocks and between them `free` holes."""
    blocks = [resource.allocate(1024, stream) for _ in range(live + free)]
    for ptr in blocks[1 : 2 * free : 2]:
        resource.deallocate(ptr, 1024, stream)
    return blocks[0 : 2 * free : 2] + blocks[2 * free :]


def threads_library() -> Any:
    root = Path(__file__).parents[2]
    folders = (
        subprocess.run(
            [sys.executable, root / "rmm_managed_bridge" / "_native" / "find_headers.py"],
            capture_output=True,
            text=True,
            check=True,
        )
        .stdout.strip()
        .split(";")
    )
    out = Path(tempfile.mkdtemp()) / "native_threads.so"
    subprocess.run(
        [
            "g++",
            "-O2",
            "-std=c++20",
            "-shared",
            "-fPIC",
            "-DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE",
            *[f"-isystem{folder}" for folder in folders[2:]],
            Path(__file__).with_name("native_threads.cpp"),
            f"{folders[1]}/lib64/librmm.so",
            "-o",
            out,
            "-pthread",
        ],
        check=True,
    )
    library = ctypes.CDLL(str(out))
    library.bench_pairs.restype = ctypes.c_double
    return library


def threaded(library: Any, streams: list[Any], threads: int, pairs: int) -> float:
    handles = (ctypes.c_size_t * 8)(*[stream.ptr for stream in streams])
    return min(library.bench_pairs(threads, ctypes.c_long(pairs), ctypes.c_size_t(1024), handles) for _ in range(3))


def peers(library: Any, streams: list[Any], stream: Any) -> dict[str, float]:
    """Return what each framework takes on its own, and RMM's pool."""
    rmm.reinitialize(**POOL)
    pool = rmm.mr.get_current_device_resource()
    times = {
        "cupy": best_ns(lambda: cupy.empty(1024, "u1")),
        "warp": best_ns(lambda: warp.empty(256, dtype=warp.uint8, device="cuda:0")),
        "numpy": best_ns(lambda: np.empty(1024, "u1"), 20_000),
        "ones": best_ns(lambda: np.ones(1 << 23), 3),
        "async": best_ns(pair(rmm.mr.CudaAsyncMemoryResource(initial_pool_size=1 << 26), stream)),
        "pair": best_ns(pair(pool, stream)),
        "8 threads": threaded(library, streams, 8, 2000),
        "1 thread": threaded(library, streams, 1, 10_000),
    }
    kept = fragment(pool, stream, 5_000, 5_000)
    times["fragmented"] = best_ns(pair(pool, stream), 200)
    for ptr in kept:
        pool.deallocate(ptr, 1024, stream)
    return times


def ours(library: Any, streams: list[Any], stream: Any) -> dict[str, float]:
    """Return the same with the bridge installed over RMM's pool."""
    with bridge.installed(frameworks=["numpy", "cupy", "warp"]):
        mine = rmm.mr.get_current_device_resource()
        for each in streams:  # streams that CuPy knows are held from their first block on
            with each:
                cupy.empty(10)
        times = {
            "cupy": best_ns(lambda: cupy.empty(1024, "u1")),
            "warp": best_ns(lambda: warp.empty(256, dtype=warp.uint8, device="cuda:0")),
            "numpy": best_ns(lambda: np.empty(1024, "u1"), 20_000),
            "ones": best_ns(lambda: np.ones(1 << 23), 3),
            "pair": best_ns(pair(mine, stream)),
            "8 threads": threaded(library, streams, 8, 20_000),
            "1 thread": threaded(library, streams, 1, 100_000),
        }
        kept = fragment(mine, stream, 100_000, 50_000)
        times["fragmented"] = best_ns(pair(mine, stream))
        for ptr in kept:
            mine.deallocate(ptr, 1024, stream)
    return times


def main() -> None:
    warp.config.quiet = True
    warp.init()
    library = threads_library()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(8)]
    stream = new_stream()
    # In turn, and the best of each: the machine is slower by half for seconds at a time.
    rounds = [(peers(library, streams, stream), ours(library, streams, stream)) for _ in range(ROUNDS)]
    theirs = {name: min(each[0][name] for each in rounds) for name in rounds[0][0]}
    mine = {name: min(each[1][name] for each in rounds) for name in rounds[0][1]}
    rows = [
        Row("allocate + free 1 KiB from Python", mine["pair"], "RMM pool over managed", theirs["pair"], 0.10),
        Row("the same", mine["pair"], "CudaAsyncMemoryResource", theirs["async"], 0.30),
        Row("1 native thread", mine["1 thread"], "RMM pool, 1 thread", theirs["1 thread"], None),
        Row("8 native threads, a stream each", mine["8 threads"], "RMM pool, 8 threads", theirs["8 threads"], 0.05),
        Row("cupy.empty(1024, 'u1')", mine["cupy"], "CuPy's pool", theirs["cupy"], 1.0),
        Row("wp.empty(256)", mine["warp"], "Warp's mempool", theirs["warp"], 1.0),
        Row("np.empty(1024, 'u1')", mine["numpy"], "NumPy's own", theirs["numpy"], 1.25),
        Row("np.ones(1 << 23)", mine["ones"], "NumPy's own", theirs["ones"], 0.7),
        Row("pair, 100,000 live, 50,000 free between", mine["fragmented"], "our empty pool", mine["pair"], 1.5),
        Row("the same", mine["fragmented"], "RMM pool, 5,000 live, 5,000 free", theirs["fragmented"], None),
    ]
    with bridge.installed(frameworks=["numpy", "cupy", "warp"]):
        rows += side_rows()
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print_rows(
        f"{device}, RMM {rmm.__version__}, CuPy {cupy.__version__}, Warp {warp.__version__}, call sites on", rows
    )


if __name__ == "__main__":
    main()
