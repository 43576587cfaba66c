"""The room that the bridge's hints call, on the fake driver; and a list of what reached it."""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest.mock import patch

import rmm_managed_bridge as bridge
from fake_cuda import FakeCuda
from rmm_managed_bridge.hints.driver import Attributes, DriverRefusedError, OwnStream, Range

ADVICE = {
    "SET_READ_MOSTLY": 1,
    "UNSET_READ_MOSTLY": 2,
    "SET_PREFERRED_LOCATION": 3,
    "UNSET_PREFERRED_LOCATION": 4,
    "SET_ACCESSED_BY": 5,
    "UNSET_ACCESSED_BY": 6,
}


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Reached(NamedTuple):
    """One call of the room."""

    what: str
    ranges: tuple[Range, ...]
    place: int = -2
    stream: int = -1


class FakeHints:
    """A `HintDriver`, through the functions that the fake driver exports."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.reached: list[Reached] = []

    def prefetch(self, ranges: Sequence[Range], place: int, stream: int) -> None:
        self.reached.append(Reached("prefetch", tuple(ranges), place, stream))
        for low, high in ranges:
            self._call("cuMemPrefetchAsync_v2", *_bytes(low, high), _location(place), 0, ctypes.c_void_p(stream))

    def advise(self, pages: Range, advice: str, place: int) -> None:
        self.reached.append(Reached(advice, (pages,), place))
        self._call("cuMemAdvise_v2", *_bytes(*pages), ADVICE[advice], _location(place))

    def discard(self, pages: Range, stream: int) -> None:
        self.reached.append(Reached("discard", (pages,), stream=stream))
        low, size = ctypes.c_uint64(pages[0]), ctypes.c_size_t(pages[1] - pages[0])
        self._call(
            "cuMemDiscardBatchAsync",
            ctypes.byref(low),
            ctypes.byref(size),
            ctypes.c_size_t(1),
            ctypes.c_uint64(0),
            ctypes.c_void_p(stream),
        )

    def attributes(self, pages: Range) -> Attributes:
        found = {self.fake.page(address) for address in range(*pages, 4096)}
        same = [(values.pop() if len(values) == 1 else None) for values in map(set, zip(*found, strict=True))]
        return Attributes(
            last_prefetch=-2 if same[3] is None else same[3],
            read_mostly=bool(same[0]),
            preferred=-2 if same[1] is None else same[1],
            accessed_by=same[2] or (),
        )

    def new_stream(self) -> OwnStream:
        return OwnStream(self.fake.stream().handle)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self.fake.lib, name)(*arguments)
        if result != 0:
            raise DriverRefusedError(f"{name}: FAKE_CUDA_ERROR_{result}")


@contextlib.contextmanager
def using_installed(hints: bridge.Hints | str) -> Iterator[None]:
    """Say in `install` which hints count. Nothing is hooked: the pools are the test's own."""
    # A call that names the host backend and hints would be warned of as a contradiction.
    with patch.dict(os.environ, RMM_BRIDGE_BACKEND="host"), bridge.installed(frameworks=[], hints=hints):
        yield


def hints_counted() -> tuple[dict[str, int], dict[str, int]]:
    """Return how many hints were given, by action, and how many were skipped, by reason."""
    stats = bridge.stats()
    return dict(stats.hints_done), dict(stats.hints_skipped)


def _bytes(low: int, high: int) -> tuple[ctypes.c_uint64, ctypes.c_size_t]:
    return ctypes.c_uint64(low), ctypes.c_size_t(high - low)


def _location(place: int) -> _Location:
    return _Location(2, 0) if place < 0 else _Location(1, place)
