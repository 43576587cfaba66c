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

import rmm_managed_bridge as bridge

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


def main() -> None:
    warp.config.quiet = True
    warp.init()
    library = threads_library()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(8)]
    stream = new_stream()
    plain = {
        "cupy": best_ns(lambda: cupy.empty(1024, "u1")),
        "warp": best_ns(lambda: warp.empty(256, dtype=warp.uint8, device="cuda:0")),
        "numpy": best_ns(lambda: np.empty(1024, "u1"), 20_000),
        "ones": best_ns(lambda: np.ones(1 << 23), 3),
        "async": best_ns(pair(rmm.mr.CudaAsyncMemoryResource(initial_pool_size=1 << 26), stream)),
    }
    rmm.reinitialize(**POOL)
    pool = rmm.mr.get_current_device_resource()
    plain["pool"] = best_ns(pair(pool, stream))
    plain["threads"] = threaded(library, streams, 8, 2000)
    plain["thread"] = threaded(library, streams, 1, 10_000)
    kept = fragment(pool, stream, 5_000, 5_000)
    plain["fragmented"] = best_ns(pair(pool, stream), 200)
    for ptr in kept:
        pool.deallocate(ptr, 1024, stream)

    bridge.install(frameworks=["numpy", "cupy", "warp"])
    mine = rmm.mr.get_current_device_resource()
    ours = best_ns(pair(mine, stream))
    # Streams that CuPy knows are held from their first block on.
    for each in streams:
        with each:
            cupy.empty(10)
    rows = [
        Row("allocate + free 1 KiB from Python", ours, "RMM pool over managed", plain["pool"], 0.10),
        Row("the same", ours, "CudaAsyncMemoryResource", plain["async"], 0.30),
        Row("1 native thread", threaded(library, streams, 1, 100_000), "RMM pool, 1 thread", plain["thread"], None),
        Row(
            "8 native threads, a stream each",
            threaded(library, streams, 8, 20_000),
            "RMM pool, 8 threads",
            plain["threads"],
            0.05,
        ),
        Row("cupy.empty(1024, 'u1')", best_ns(lambda: cupy.empty(1024, "u1")), "CuPy's pool", plain["cupy"], 1.0),
        Row(
            "wp.empty(256)",
            best_ns(lambda: warp.empty(256, dtype=warp.uint8, device="cuda:0")),
            "Warp's mempool",
            plain["warp"],
            1.0,
        ),
        Row("np.empty(1024, 'u1')", best_ns(lambda: np.empty(1024, "u1"), 20_000), "NumPy's own", plain["numpy"], 1.25),
        Row("np.ones(1 << 23)", best_ns(lambda: np.ones(1 << 23), 3), "NumPy's own", plain["ones"], 0.7),
    ]
    kept = fragment(mine, stream, 100_000, 50_000)
    fragmented = best_ns(pair(mine, stream))
    rows.append(Row("pair with 100,000 live, 50,000 free between", fragmented, "our empty pool", ours, 1.5))
    rows.append(Row("the same", fragmented, "RMM pool, 5,000 live, 5,000 free", plain["fragmented"], None))
    for ptr in kept:
        mine.deallocate(ptr, 1024, stream)
    bridge.uninstall()
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print_rows(
        f"{device}, RMM {rmm.__version__}, CuPy {cupy.__version__}, Warp {warp.__version__}, call sites on", rows
    )


if __name__ == "__main__":
    main()
