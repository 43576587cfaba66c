"""Small programs run in an interpreter of their own, and the memory that RMM resources without a GPU are made of."""

import ctypes
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1]
_NATIVE_LINES_OF_WARP = (
    "Warp CUDA warning: Could not find or load the NVIDIA CUDA driver. GPU execution will not be available.",
    "Warp CUDA warning: No CUDA-capable devices were found",
)


def run_python(
    code: str,
    *arguments: object,
    options: Sequence[str] = ("-W", "error"),
    environment: dict[str, str] | None = None,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter that sees no GPU, in an empty folder, with the modules that the tests see."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(textwrap.dedent(code))
        return subprocess.run(
            [sys.executable, *options, str(program), *map(str, arguments)],
            cwd=folder,
            env=program_environment() | (environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


def program_environment() -> dict[str, str]:
    """Return the environment that a program of a test has."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RMM_BRIDGE_")}
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return kept | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join([*paths, str(_TESTS)])}


def run_on_gpu(code: str, *, timeout: float = 240) -> None:
    """Run a program that sees the GPU. It must end well, and say nothing that Python or C++ says at a bad end."""
    code = textwrap.dedent(code) + "\nprint('done')\n"
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("done\n"), done.stdout
    for bad in ("Traceback", "Exception ignored", "terminate called", "core dumped", "Error"):
        assert bad not in done.stderr, done.stderr


def silent_stderr(result: subprocess.CompletedProcess[str]) -> str:
    """Return what a program wrote to stderr, but for the line in which Warp's native part misses the driver."""
    lines = result.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_NATIVE_LINES_OF_WARP))


def must_succeed(result: subprocess.CompletedProcess[str]) -> str:
    """Return the program's output; it must have ended with exit code 0 and silent stderr."""
    assert (result.returncode, silent_stderr(result)) == (0, ""), f"{result.stdout}\n{result.stderr}"
    return result.stdout


_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


class HostMemory:
    """An RMM resource over the C library, which keeps count of what it gave and got back."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        import rmm

        self.live: dict[int, int] = {}
        self.given: list[int] = []
        self.wrong_frees: list[tuple[int, int]] = []
        self._limit_bytes = limit_bytes
        self.resource: Any = rmm.mr.CallbackMemoryResource(self._allocate, self._free)

    @property
    def live_bytes(self) -> int:
        return sum(self.live.values())

    def _allocate(self, size_bytes: int, stream: Any) -> int:
        if self.live_bytes + size_bytes > self._limit_bytes:
            raise MemoryError(f"{size_bytes} bytes are over the limit of {self._limit_bytes}")
        ptr = _libc.aligned_alloc(256, -(-max(size_bytes, 1) // 256) * 256)
        if not ptr:
            raise MemoryError(f"the C library has no {size_bytes} bytes")
        self.live[ptr] = size_bytes
        self.given.append(size_bytes)
        return int(ptr)

    def _free(self, ptr: int, size_bytes: int, stream: Any) -> None:
        if self.live.pop(ptr, None) != size_bytes:
            self.wrong_frees.append((ptr, size_bytes))
            return
        _libc.free(ptr)


class CHeapBlock:
    """Memory of the C library that the bridge knows nothing of."""

    def __init__(self, size_bytes: int) -> None:
        self.ptr: int = _libc.aligned_alloc(64, -(-size_bytes // 64) * 64)

    def __enter__(self) -> int:
        return self.ptr

    def __exit__(self, *_: object) -> None:
        _libc.free(self.ptr)


@contextmanager
def recorded_events(limit: int) -> Iterator[None]:
    """Let the history keep every event, and only what happens inside."""
    import rmm_managed_bridge as bridge

    bridge.record_events(0, every_event=False)
    bridge.record_events(limit)
    try:
        yield
    finally:
        bridge.record_events(0, every_event=False)
        bridge.record_events(1000, every_event=False)


def owned() -> bool:
    """Tell whether a new NumPy array comes from the bridge, here and now."""
    import numpy as np

    import rmm_managed_bridge as bridge

    return bridge.owns(np.ones(10))
