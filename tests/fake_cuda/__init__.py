"""The fake CUDA driver: built on demand, loaded into this process, and driven by tests through `FakeCuda`."""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

UNITS = sorted(Path(__file__).parent.glob("*.cpp"))
SOURCES = [*UNITS, *sorted(Path(__file__).parent.glob("*.hpp"))]

LEGACY = 0
PER_THREAD = 2
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2

Hook = ctypes.CFUNCTYPE(None)


def cuda_include() -> Path | None:
    """Return the folder with cuda.h from the nvidia-cuda-runtime wheel; the fake can do without."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for header in sorted(Path(location).glob("cu*/include/cuda.h")):
            return header.parent
    return None


@cache
def build() -> Path:
    """Return the fake driver as a shared library, built once for each state of its source."""
    include = cuda_include()
    key = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES) + str(include).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"rmm_bridge_fake_cuda_{os.getuid()}"
    library = folder / f"{key}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        fresh = folder / f"{key}.{os.getpid()}.so"
        flags = ["-shared", "-fPIC", "-O1", "-std=c++20", "-Wall", "-Wextra"]
        includes = [f"-I{include}"] if include else []
        subprocess.run(["g++", *flags, *includes, *map(str, UNITS), "-o", str(fresh)], check=True)
        fresh.replace(library)  # two sessions may build at once
    return library


@dataclass(frozen=True)
class Stream:
    """A stream of the fake driver. Its handle may come back for another one once it is destroyed; its id does not."""

    handle: int
    id: int
    device: int
    blocking: bool


class Page(NamedTuple):
    """One page of managed memory. A place is a device, -1 for the CPU, or -2 for nowhere in particular."""

    read_mostly: bool = False
    preferred: int = -2
    accessed_by: tuple[int, ...] = ()
    last_prefetch: int = -2
    resident: int = -1
    discarded: bool = False


class Prefetch(NamedTuple):
    """A prefetch that the driver took. `context` is the device whose context was current; -1 for none."""

    low: int
    size_bytes: int
    place: int
    stream: int
    context: int
    gil_held: int = 0


class FakeCuda:
    """The strings that a test pulls. Operations are numbers; streams take work when told and end it when told."""

    def __init__(self, library: Path) -> None:
        lib = ctypes.CDLL(str(library))
        long, text, u64 = ctypes.c_long, ctypes.c_char_p, ctypes.c_uint64
        for name, result, arguments in [
            ("stream_create", u64, [ctypes.c_int, ctypes.c_int]),
            ("stream_id", u64, [u64, ctypes.c_int]),
            ("stream_destroy", None, [u64]),
            ("set_current", None, [ctypes.c_int]),
            ("current", ctypes.c_int, []),
            ("set_host_function", None, [ctypes.c_int]),
            ("set_hangs", None, [ctypes.c_int]),
            ("context_depth", ctypes.c_int, []),
            ("thread_mode", ctypes.c_int, []),
            ("enqueue", long, [u64, ctypes.c_int]),
            ("join", None, [u64, u64]),
            ("advance", long, [u64, long]),
            ("finish", None, [long]),
            ("finish_all", None, []),
            ("done", ctypes.c_int, [long]),
            ("ordered", ctypes.c_int, [long, u64]),
            ("begin_capture", ctypes.c_int, [u64, ctypes.c_int]),
            ("end_capture", ctypes.c_int, [u64]),
            ("set_attribute", None, [ctypes.c_int, ctypes.c_int, ctypes.c_int]),
            ("set_pointer", None, [u64, ctypes.c_int, ctypes.c_int, ctypes.c_int]),
            ("set_active", None, [ctypes.c_int, ctypes.c_int]),
            ("set_memory", None, [u64]),
            ("set_others", None, [u64]),
            ("fail", None, [text, long, ctypes.c_int]),
            ("page", None, [u64, ctypes.POINTER(ctypes.c_int)]),
            ("prefetch", ctypes.c_int, [long, ctypes.POINTER(ctypes.c_longlong)]),
            ("pushed_out", u64, [ctypes.c_int]),
            ("on_call", None, [text, Hook]),
            ("calls", long, [text]),
            ("trace", text, []),
            ("violations", text, []),
            ("clear", None, []),
            ("reset", None, []),
            ("tell_at_exit", None, []),
        ]:
            function = getattr(lib, f"fake_{name}")
            function.restype, function.argtypes = result, arguments
        self.lib = lib
        self._hooks: list[object] = []

    def stream(self, *, blocking: bool = False, device: int = 0) -> Stream:
        """Return a new stream."""
        handle = self.lib.fake_stream_create(device, not blocking)
        return Stream(handle, self.lib.fake_stream_id(handle, device), device, blocking)

    def ambient(self, handle: int, device: int = 0) -> Stream:
        """Return the legacy stream, or this thread's per-thread one."""
        return Stream(handle, self.lib.fake_stream_id(handle, device), device, True)

    def destroy(self, stream: Stream) -> None:
        """Destroy a stream: its work goes on, its handle becomes free."""
        self.lib.fake_stream_destroy(stream.id)

    def set_current(self, device: int | None) -> None:
        """Make the context of `device` the only one of this thread; None for no context."""
        self.lib.fake_set_current(-1 if device is None else device)

    def enqueue(self, stream: Stream, *, host: bool = False) -> int:
        """Return a new operation on the stream. `host`: a Python function, which needs the GIL to end."""
        return int(self.lib.fake_enqueue(stream.id, host))

    def join(self, first: Stream, second: Stream) -> None:
        """Make `second` wait for all that is on `first`, as a program does by itself."""
        self.lib.fake_join(first.id, second.id)

    def advance(self, stream: Stream, count: int = 1) -> int:
        """End up to `count` operations of the stream; return how many ended."""
        return int(self.lib.fake_advance(stream.id, count))

    def finish(self, operation: int) -> None:
        """End an operation, and what comes before it."""
        self.lib.fake_finish(operation)

    def finish_all(self) -> None:
        """End everything."""
        self.lib.fake_finish_all()

    def done(self, operation: int) -> bool:
        """Return True if the operation has ended."""
        return bool(self.lib.fake_done(operation))

    def ordered(self, operation: int, stream: Stream) -> bool:
        """Return True if new work on the stream comes after the operation."""
        return bool(self.lib.fake_ordered(operation, stream.id))

    def begin_capture(self, stream: Stream, mode: int = GLOBAL) -> None:
        """Begin a capture from this thread."""
        assert self.lib.fake_begin_capture(stream.id, mode)

    def end_capture(self, stream: Stream) -> bool:
        """End a capture; return True if it was not lost."""
        return bool(self.lib.fake_end_capture(stream.id))

    @contextlib.contextmanager
    def host_function(self) -> Iterator[None]:
        """Run as a CUDA host function does: any call but `cuCtxGetCurrent` is a violation."""
        self.lib.fake_set_host_function(1)
        try:
            yield
        finally:
            self.lib.fake_set_host_function(0)

    def hang(self) -> None:
        """Let no work end by being asked for, until `clear`."""
        self.lib.fake_set_hangs(1)

    def set_attribute(self, device: int, attribute: int, value: int) -> None:
        """Attributes are 1 unless set."""
        self.lib.fake_set_attribute(device, attribute, value)

    def set_pointer(self, ptr: int, attribute: int, value: int, *, seen_from: int = -1) -> None:
        """Set what the driver says of an address, to one device or to all others; it knows nothing of the rest."""
        self.lib.fake_set_pointer(ptr, attribute, seen_from, value)

    def set_active(self, device: int, active: bool) -> None:
        """Set whether a device has a primary context, which all have at first."""
        self.lib.fake_set_active(device, active)

    def set_memory(self, size_bytes: int) -> None:
        """Set the memory of each device; 64 GiB at first."""
        self.lib.fake_set_memory(size_bytes)

    def fill_by_others(self, size_bytes: int) -> None:
        """Let other processes have so much of each device's memory, until `clear`."""
        self.lib.fake_set_others(size_bytes)

    def fail(self, function: str, *, skip: int = 0, result: int = 999) -> None:
        """Make the call of `function` after the next `skip` ones fail."""
        self.lib.fake_fail(function.encode(), skip, result)

    def on_call(self, function: str, action: Callable[[], None]) -> None:
        """Run `action` when the next call of `function` has had its effect: what another thread may do just then.

        A `Hook` of the caller's own, which keeps it, is not made anew each time.
        """
        hook = action
        if not isinstance(action, Hook):
            hook = Hook(action)
            self._hooks.append(hook)
        self.lib.fake_on_call(function.encode(), hook)

    def page(self, address: int) -> Page:
        """Return what the driver knows of the page at an address."""
        out = (ctypes.c_int * 6)()
        self.lib.fake_page(address, out)
        devices = tuple(place for place in range(-1, 2) if out[2] >> (place + 1) & 1)
        return Page(bool(out[0]), out[1], devices, out[3], out[4], bool(out[5]))

    def prefetches(self) -> list[Prefetch]:
        """Return the prefetches that were done since `clear`, whoever asked for them, in order."""
        out, found = (ctypes.c_longlong * 6)(), []
        while self.lib.fake_prefetch(len(found), out):
            found.append(Prefetch(*out))
        return found

    def pushed_out(self) -> tuple[int, int]:
        """Return the bytes that devices which ran full have written back to the CPU, and those that they let go."""
        return int(self.lib.fake_pushed_out(0)), int(self.lib.fake_pushed_out(1))

    def calls(self, function: str = "") -> int:
        """Return how often a function was called since `clear`; all of them without a name."""
        return int(self.lib.fake_calls(function.encode()))

    def trace(self) -> list[str]:
        """Return the driver calls since `clear`, in order."""
        return self.lib.fake_trace().decode().split()

    def violations(self) -> list[str]:
        """Return what would have lost a capture, hung or crashed since `clear`."""
        return self.lib.fake_violations().decode().splitlines()

    def tell_at_exit(self) -> None:
        """Print the calls since `clear` when the process ends, after Python and all that is loaded after this."""
        self.lib.fake_tell_at_exit()

    def clear(self) -> None:
        """Forget calls, violations, faults, hooks, attributes and pointers; streams and their work stay."""
        self.lib.fake_clear()

    def reset(self) -> None:
        """Also end all work, and all captures."""
        self.clear()
        self.lib.fake_reset()


@cache
def load() -> FakeCuda:
    """Make the fake the CUDA driver of this process, for good: `core` loads a driver once."""
    from rmm_managed_bridge._native import process as native_process

    library = build()
    os.environ["RMM_BRIDGE_DRIVER_LIBRARY"] = str(library)
    fake = FakeCuda(library)
    count, why_not = native_process.load_driver(str(library))
    assert count == 2, why_not or "another driver was loaded first"
    return fake
