"""A thread that writes down the live bytes of each framework while the demo works."""

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rmm_managed_bridge.reports.timeline import MemorySample

__all__ = ["MemorySampler", "thin"]

_MOST_SAMPLES = 4000


class MemorySampler:
    """Samples in the background between ``__enter__`` and ``__exit__``, and at every mark.

    Parameters
    ----------
    read
        Returns live bytes by framework; called from the sampling thread too.
    interval_s
        Time between samples at first; it doubles whenever there are too many of them.
    """

    def __init__(self, read: Callable[[], Mapping[str, int]], interval_s: float = 0.01) -> None:
        self._read = read
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmm-bridge-demo-sampler", daemon=True)
        self._samples: list[MemorySample] = []
        self._error: Exception | None = None
        self._start_s = 0.0

    def __enter__(self) -> "MemorySampler":
        self._start_s = time.perf_counter()
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            if self._error is not None:
                raise self._error
            self._sample()

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        """What was written down so far, in order of time."""
        with self._lock:
            return tuple(self._samples)

    def mark(self, name: str) -> None:
        """Take a sample now, and say that `name` begins."""
        self._sample((name,))

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._interval_s):
                self._sample()
        except Exception as error:
            # Raised again by __exit__: a thread's own traceback would go to stderr and change nothing.
            self._error = error

    def _sample(self, marks: tuple[str, ...] = ()) -> None:
        with self._lock:
            sizes_bytes = dict(self._read())
            self._samples.append(MemorySample(time.perf_counter() - self._start_s, sizes_bytes, marks))
            if len(self._samples) > _MOST_SAMPLES:
                self._samples = thin(self._samples)
                self._interval_s *= 2


def thin(samples: list[MemorySample]) -> list[MemorySample]:
    """Return about half of the samples: of each two neighbours the higher, or both if one has marks."""
    kept: list[MemorySample] = []
    for start in range(0, len(samples), 2):
        pair = samples[start : start + 2]
        if any(sample.marks for sample in pair):
            kept.extend(pair)
        else:
            kept.append(max(pair, key=lambda sample: sample.current_bytes))
    return kept
