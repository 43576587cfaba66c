"""The driver calls behind hints: through `cuda.core` where it has them, else through `cuda.bindings`.

RMM needs `cuda.bindings`; `cuda.core` is optional and has managed memory since 1.1. Neither is imported before the
first hint. Callers make the context current and the capture mode relaxed (`hint_table.driver_scope`).
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from rmm_managed_bridge._native.hint_table import CPU, NOWHERE
from rmm_managed_bridge.errors import BridgeError
from rmm_managed_bridge.frameworks.registry import LEGACY

Range = tuple[int, int]
"""(start, end) in whole pages."""

_LEGACY = (LEGACY, 1)  # stream 0 and CU_STREAM_LEGACY
_PER_THREAD = 2


class DriverRefusedError(BridgeError):
    """The driver did not take a hint; the text is its own."""


class NoLibraryError(BridgeError):
    """There is no Python library to call the driver with."""


class OwnStream:
    """A stream of the bridge's own. It lives as long as the process."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


class Attributes(NamedTuple):
    """What the driver knows of a range, where all its pages agree."""

    last_prefetch: int
    read_mostly: bool
    preferred: int
    accessed_by: tuple[int, ...]


class HintDriver(Protocol):
    """What hints ask of the driver. A place is a device number or `CPU`. Failures are `DriverRefusedError`."""

    def prefetch(self, ranges: Sequence[Range], place: int, stream: int) -> None:
        """Move the ranges to `place`, in the order of the stream."""

    def advise(self, pages: Range, advice: str, place: int) -> None:
        """Give advice: ``"SET_READ_MOSTLY"``, ``"UNSET_ACCESSED_BY"`` and so on, as `CU_MEM_ADVISE_...` has them."""

    def discard(self, pages: Range, stream: int) -> None:
        """Let the contents go, in the order of a stream that is not the legacy one."""

    def attributes(self, pages: Range) -> Attributes:
        """Return what the driver knows of the range."""

    def new_stream(self) -> OwnStream:
        """Return a new non-blocking stream of the current context."""


@functools.cache
def load() -> HintDriver:
    """Return the driver calls of this process.

    Raises
    ------
    NoLibraryError
        If neither `cuda.core` nor `cuda.bindings` can be imported.
    """
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NoLibraryError(f"cuda.bindings cannot be imported ({error})") from None
    try:
        core = importlib.import_module("cuda.core")
        return CudaCore(bindings, core) if hasattr(core, "ManagedBuffer") else CudaBindings(bindings)
    except ImportError:
        return CudaBindings(bindings)


class CudaBindings:
    """Everything by `cuda.bindings.driver`."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        # In the bindings for CUDA 12 the forms that take a location have names of their own.
        self._prefetch = getattr(driver, "cuMemPrefetchAsync_v2", driver.cuMemPrefetchAsync)
        self._advise = getattr(driver, "cuMemAdvise_v2", driver.cuMemAdvise)

    def prefetch(self, ranges: Sequence[Range], place: int, stream: int) -> None:
        """See `HintDriver`."""
        for low, high in ranges:
            self._call(self._prefetch, low, high - low, self._location(place), 0, stream)

    def advise(self, pages: Range, advice: str, place: int) -> None:
        """See `HintDriver`."""
        which = getattr(self._driver.CUmem_advise, f"CU_MEM_ADVISE_{advice}")
        self._call(self._advise, pages[0], pages[1] - pages[0], which, self._location(place))

    def discard(self, pages: Range, stream: int) -> None:
        """See `HintDriver`."""
        low = self._driver.CUdeviceptr(pages[0])  # in a list plain integers are not taken
        self._call(self._driver.cuMemDiscardBatchAsync, [low], [pages[1] - pages[0]], 1, 0, stream)

    def attributes(self, pages: Range) -> Attributes:
        """See `HintDriver`."""
        devices = self._call(self._driver.cuDeviceGetCount)

        def ask(name: str, count: int = 1) -> Any:
            which = getattr(self._driver.CUmem_range_attribute, f"CU_MEM_RANGE_ATTRIBUTE_{name}")
            return self._call(self._driver.cuMemRangeGetAttribute, 4 * count, which, pages[0], pages[1] - pages[0])

        # All of the driver's numbers are ours: -1 is the CPU, -2 nowhere in particular.
        return Attributes(
            last_prefetch=int(ask("LAST_PREFETCH_LOCATION")),
            read_mostly=bool(ask("READ_MOSTLY")),
            preferred=int(ask("PREFERRED_LOCATION")),
            accessed_by=tuple(place for place in ask("ACCESSED_BY", devices + 1) if place != NOWHERE),
        )

    def new_stream(self) -> OwnStream:
        """See `HintDriver`."""
        stream = self._call(self._driver.cuStreamCreate, self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return OwnStream(int(stream))

    def _location(self, place: int) -> Any:
        location = self._driver.CUmemLocation()
        kinds = self._driver.CUmemLocationType
        location.type = kinds.CU_MEM_LOCATION_TYPE_HOST if place == CPU else kinds.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = max(place, 0)
        return location

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with _refusals():
            error, *values = function(*arguments)
        if int(error) != 0:
            raise DriverRefusedError(f"{function.__name__}: {getattr(error, 'name', error)}")
        return values[0] if values else None


class CudaCore(CudaBindings):
    """What `cuda.core` has through it, the rest as `CudaBindings`: it does not tell the last prefetch."""

    def __init__(self, driver: Any, core: Any) -> None:
        super().__init__(driver)
        self._core = core
        self._utils = importlib.import_module("cuda.core.utils")

    def prefetch(self, ranges: Sequence[Range], place: int, stream: int) -> None:
        """See `HintDriver`."""
        with _refusals():
            on, to = self._stream(stream), self._place(place)
            buffers = [self._buffer(pages) for pages in ranges]
            # The driver takes no batch on the legacy stream.
            if len(buffers) > 1 and stream not in _LEGACY:
                self._utils.prefetch_batch(on, buffers, to)
                return
            for buffer in buffers:
                buffer.prefetch(to, stream=on)

    def advise(self, pages: Range, advice: str, place: int) -> None:
        """See `HintDriver`."""
        what, _, which = advice.partition("_")
        with _refusals():
            buffer = self._buffer(pages)
            if which == "READ_MOSTLY":
                buffer.read_mostly = what == "SET"
            elif which == "PREFERRED_LOCATION":
                buffer.preferred_location = self._place(place) if what == "SET" else None
            elif what == "SET":
                buffer.accessed_by.add(self._place(place))
            else:
                buffer.accessed_by.discard(self._place(place))

    def discard(self, pages: Range, stream: int) -> None:
        """See `HintDriver`."""
        with _refusals():
            self._buffer(pages).discard(stream=self._stream(stream))

    def _buffer(self, pages: Range) -> Any:
        return self._core.ManagedBuffer.from_handle(pages[0], pages[1] - pages[0])

    def _place(self, place: int) -> Any:
        return self._core.Host() if place == CPU else self._core.Device(place)

    def _stream(self, handle: int) -> Any:
        if handle in _LEGACY:
            return self._core.LEGACY_DEFAULT_STREAM
        return self._core.PER_THREAD_DEFAULT_STREAM if handle == _PER_THREAD else self._core.Stream.from_handle(handle)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what the libraries raise, whose classes are their own affair, into `DriverRefusedError`."""
    try:
        yield
    except Exception as error:
        raise DriverRefusedError(f"{type(error).__name__}: {error}") from error
