"""Memory over time: what a sampler writes down and the pictures draw."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["MemorySample", "framework_names", "highest_sample"]


@dataclass(frozen=True)
class MemorySample:
    """Live bytes of each framework at one moment."""

    time_s: float
    """Seconds since the first sample."""
    bytes_by_framework: Mapping[str, int] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    """Names of what begins at this moment, such as phases of a program."""

    @property
    def current_bytes(self) -> int:
        """Live bytes of all frameworks together."""
        return sum(self.bytes_by_framework.values())


def framework_names(samples: Iterable[MemorySample]) -> tuple[str, ...]:
    """Return every framework in `samples`, the one that ever held the most bytes first."""
    highest: dict[str, int] = {}
    for sample in samples:
        for name, size_bytes in sample.bytes_by_framework.items():
            highest[name] = max(highest.get(name, 0), size_bytes)
    return tuple(sorted(highest, key=lambda name: (-highest[name], name)))


def highest_sample(samples: Sequence[MemorySample]) -> MemorySample:
    """Return the first of the samples with the most live bytes.

    Raises
    ------
    ValueError
        If there are no samples.
    """
    if not samples:
        raise ValueError("there are no memory samples; take at least one before asking for the highest")
    return max(samples, key=lambda sample: sample.current_bytes)
