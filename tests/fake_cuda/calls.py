"""A CUDA driver by ctypes, the real one or the fake: both export the same names, so one class calls either.

Calls return the driver's result rather than raise, since a failure may be the fact that is looked for.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

REAL_LIBRARY = "libcuda.so.1"

OK, INVALID_CONTEXT, INVALID_HANDLE, NOT_READY = 0, 201, 400, 600
UNSUPPORTED, INVALIDATED, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT = 900, 901, 903, 904, 905, 906, 907
NONE, ACTIVE, LOST = 0, 1, 2  # CUstreamCaptureStatus

_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING, as the bridge makes its events
_ATTACH_GLOBAL, _IS_MANAGED, _SET_ACCESSED_BY, _ON_DEVICE = 1, 8, 5, 1
_GATE_SECONDS = 20  # work that a failed test has not let go ends by itself


class Location(ctypes.Structure):
    """CUmemLocation, which is passed by value."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


_P, _INT, _U32, _U64, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t
_OUT = _P  # where an answer goes
HostFunction = ctypes.CFUNCTYPE(None, _P)
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [_U32],
    "cuDevicePrimaryCtxRetain": [_OUT, _INT],
    "cuCtxPushCurrent_v2": [_P],
    "cuCtxPopCurrent_v2": [_OUT],
    "cuCtxSynchronize": [],
    "cuCtxRecordEvent": [_P, _P],
    "cuThreadExchangeStreamCaptureMode": [_OUT],
    "cuStreamCreate": [_OUT, _U32],
    "cuStreamDestroy_v2": [_P],
    "cuStreamGetId": [_P, _OUT],
    "cuStreamIsCapturing": [_P, _OUT],
    "cuStreamSynchronize": [_P],
    "cuStreamWaitEvent": [_P, _P, _U32],
    "cuStreamBeginCapture_v2": [_P, _INT],
    "cuStreamEndCapture": [_P, _OUT],
    "cuGraphCreate": [_OUT, _U32],
    "cuGraphDestroy": [_P],
    "cuGraphInstantiateWithFlags": [_OUT, _P, _U64],
    "cuGraphExecDestroy": [_P],
    "cuEventCreate": [_OUT, _U32],
    "cuEventDestroy_v2": [_P],
    "cuEventRecord": [_P, _P],
    "cuEventQuery": [_P],
    "cuEventSynchronize": [_P],
    "cuMemAllocManaged": [_OUT, _SIZE, _U32],
    "cuMemFree_v2": [_U64],
    "cuMemAdvise_v2": [_U64, _SIZE, _INT, Location],
    "cuMemPrefetchAsync_v2": [_U64, _SIZE, Location, _U32, _P],
    "cuPointerGetAttribute": [_OUT, _INT, _U64],
}


class Driver:
    """Device 0 of a driver. Handles of streams and events, and addresses, are plain numbers."""

    def __init__(self, library: str) -> None:
        self.lib = ctypes.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = ctypes.c_int, arguments
        must(self.lib.cuInit(0))
        self.context = must(self._out(self.lib.cuDevicePrimaryCtxRetain, 0))  # never let go: others use it too
        self._work: list[object] = []

    def _out(self, function: Any, *arguments: object, kind: type[Any] = ctypes.c_uint64) -> tuple[int, int]:
        """Call a function whose first parameter is where its answer goes."""
        out = kind(0)
        return int(function(ctypes.byref(out), *arguments)), out.value

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context of device 0 this thread's current one."""
        must(self.lib.cuCtxPushCurrent_v2(self.context))
        try:
            yield
        finally:
            must(self._out(self.lib.cuCtxPopCurrent_v2))

    def exchange(self, mode: int) -> int:
        """Set the thread's capture mode and return the one before."""
        out = ctypes.c_int(mode)
        must(self.lib.cuThreadExchangeStreamCaptureMode(ctypes.byref(out)))
        return out.value

    def context_synchronize(self) -> int:
        return int(self.lib.cuCtxSynchronize())

    def context_record(self, event: int) -> int:
        return int(self.lib.cuCtxRecordEvent(self.context, event))

    def stream(self, *, blocking: bool) -> int:
        """Return a new stream."""
        return must(self._out(self.lib.cuStreamCreate, 0 if blocking else 1))

    def stream_destroy(self, stream: int) -> int:
        return int(self.lib.cuStreamDestroy_v2(stream))

    def id_of(self, stream: int) -> tuple[int, int]:
        """Return result and id."""
        out = ctypes.c_uint64(0)
        return int(self.lib.cuStreamGetId(stream, ctypes.byref(out))), out.value

    def status(self, stream: int) -> tuple[int, int]:
        """Return result and capture status. The real driver crashes for a destroyed stream."""
        out = ctypes.c_int(0)
        return int(self.lib.cuStreamIsCapturing(stream, ctypes.byref(out))), out.value

    def synchronize(self, stream: int) -> int:
        return int(self.lib.cuStreamSynchronize(stream))

    def wait(self, stream: int, event: int) -> int:
        """Make a stream wait for an event."""
        return int(self.lib.cuStreamWaitEvent(stream, event, 0))

    def begin_capture(self, stream: int, mode: int) -> int:
        return int(self.lib.cuStreamBeginCapture_v2(stream, mode))

    def end_capture(self, stream: int) -> int:
        """End a capture and destroy its graph."""
        graph = ctypes.c_void_p()
        result = int(self.lib.cuStreamEndCapture(stream, ctypes.byref(graph)))
        if graph.value:
            must(self.lib.cuGraphDestroy(graph))
        return result

    def instantiate_a_graph(self) -> int:
        """Make an empty graph executable."""
        graph = must(self._out(self.lib.cuGraphCreate, 0))
        result, executable = self._out(self.lib.cuGraphInstantiateWithFlags, graph, 0)
        if result == OK:
            must(self.lib.cuGraphExecDestroy(executable))
        must(self.lib.cuGraphDestroy(graph))
        return result

    def event(self) -> tuple[int, int]:
        """Return result and a new event."""
        return self._out(self.lib.cuEventCreate, _DISABLE_TIMING)

    def event_destroy(self, event: int) -> int:
        return int(self.lib.cuEventDestroy_v2(event))

    def record(self, event: int, stream: int) -> int:
        return int(self.lib.cuEventRecord(event, stream))

    def query(self, event: int) -> int:
        return int(self.lib.cuEventQuery(event))

    def event_synchronize(self, event: int) -> int:
        return int(self.lib.cuEventSynchronize(event))

    def allocate(self, size: int) -> tuple[int, int]:
        """Return result and the address of managed memory."""
        return self._out(self.lib.cuMemAllocManaged, size, _ATTACH_GLOBAL)

    def free(self, ptr: int) -> int:
        return int(self.lib.cuMemFree_v2(ptr))

    def advise(self, ptr: int, size: int) -> int:
        """Advise that device 0 accesses the memory."""
        return int(self.lib.cuMemAdvise_v2(ptr, size, _SET_ACCESSED_BY, Location(_ON_DEVICE, 0)))

    def prefetch(self, ptr: int, size: int, stream: int) -> int:
        """Fetch memory to device 0."""
        return int(self.lib.cuMemPrefetchAsync_v2(ptr, size, Location(_ON_DEVICE, 0), 0, stream))

    def is_managed(self, ptr: int) -> tuple[int, int]:
        """Return result and whether the driver says that the address is of managed memory."""
        return self._out(self.lib.cuPointerGetAttribute, _IS_MANAGED, ptr, kind=ctypes.c_int)

    def enqueue(self, stream: int) -> int:
        """Put work on a stream that does nothing."""

        @HostFunction
        def function(_: object) -> None:
            pass

        self._work.append(function)  # the driver may call it as long as it likes
        return int(self.lib.cuLaunchHostFunc(ctypes.c_void_p(stream), function, None))

    def hold(self, stream: int) -> Callable[[], None]:
        """Put work on a stream that goes on until the function returned is called."""
        gate = threading.Event()

        @HostFunction
        def function(_: object) -> None:
            gate.wait(_GATE_SECONDS)

        self._work.append(function)
        must(self.lib.cuLaunchHostFunc(ctypes.c_void_p(stream), function, None))

        def let_go() -> None:
            gate.set()
            must(self.synchronize(stream))

        return let_go


def must(result: Any) -> Any:
    """Return the value of a call that a fact only builds on, which has to succeed."""
    code, value = result if isinstance(result, tuple) else (result, None)
    assert code == OK, f"the driver answered {code}"
    return value
