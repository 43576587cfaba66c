"""The wave equation of the demo: leapfrog on a square with reflecting walls, and what must be true of its answer.

Displacement u obeys ``d2u/dt2 = c2 * laplace(u)`` with no flux through the walls. In units of the cell and of the time
step, one step is ``u[n+1] = 2 u[n] - u[n-1] + q * L u[n]`` with ``q = (c dt / h)**2``, where L sums the differences to
the neighbours that exist. L is symmetric, so the scheme conserves a discrete energy, and the cosines of the square are
its eigenvectors, so the answer after any number of steps is known without stepping.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "COURANT_SQUARED",
    "Check",
    "Field",
    "energy",
    "exact_solution",
    "first_step",
    "median_wavelength",
    "relative_error",
    "rounding_limit",
    "run_on_plain_numpy",
    "step",
]

Field = npt.NDArray[np.float32]

# Leapfrog is stable in two dimensions up to 1/2.
COURANT_SQUARED = 0.4


@dataclass(frozen=True)
class Check:
    """One thing that must hold: `value` is at most `limit`."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """False also where the value is not a number."""
        return self.value <= self.limit


def rounding_limit(steps: int) -> float:
    """Return how far float32 may be off after `steps` steps: several times what was seen, far less than a lost step."""
    return 2e-5 * float(max(1.0, steps / 500) ** 1.5)


def step(previous: Any, current: Any, following: Any) -> None:
    """Write one leapfrog step into `following`; works on arrays of NumPy and of CuPy.

    The change of the last step is added first and the curvature last, which loses less to rounding than
    ``2 * current - previous``.
    """
    following[...] = current
    following -= previous
    following += current
    add_curvature(current, following, COURANT_SQUARED)


def first_step(initial: Field) -> Field:
    """Return the field after one step from rest."""
    field = initial.copy()
    add_curvature(initial, field, COURANT_SQUARED / 2)
    return field


def add_curvature(field: Any, target: Any, factor: float) -> None:
    """Add `factor` times the sum of the differences to all neighbours; walls have none beyond them."""
    for source, sink in ((field, target), (field.T, target.T)):
        flow = source[1:] - source[:-1]
        flow *= factor
        sink[:-1] += flow
        sink[1:] -= flow


def run_on_plain_numpy(initial: Field, steps: int) -> Field:
    """Return the field after `steps` steps from rest, by NumPy alone."""
    previous, current = initial.copy(), first_step(initial)
    following = np.empty_like(current)
    for _ in range(steps - 1):
        step(previous, current, following)
        previous, current, following = current, following, previous
    return current


def energy(earlier: Field, later: Field) -> float:
    """Return the energy between two neighbouring steps: of motion, and of stretching across all neighbours."""
    moved = later - earlier
    total = float(np.square(moved).sum(dtype=np.float64))
    for one, two in ((earlier, later), (earlier.T, later.T)):
        stretched = (one[1:] - one[:-1]) * (two[1:] - two[:-1])
        total += COURANT_SQUARED * float(stretched.sum(dtype=np.float64))
    return total / 2


def exact_solution(initial: Field, steps: int) -> Field:
    """Return the field after `steps` steps from rest, by turning each cosine of the square by its own phase.

    Mirrored at its walls the square becomes periodic, and its cosines are the real part of a Fourier transform.
    """
    rows, columns = initial.shape
    mirrored = np.pad(initial, ((0, rows), (0, columns)), mode="symmetric")
    spectrum = np.fft.rfft2(mirrored)
    row_part = np.sin(np.pi * np.fft.fftfreq(2 * rows)) ** 2
    column_part = np.sin(np.pi * np.fft.rfftfreq(2 * columns)) ** 2
    curvature = 4 * (row_part[:, None] + column_part[None, :])
    phase = np.arccos(1 - COURANT_SQUARED / 2 * curvature)
    phase *= steps
    spectrum *= np.cos(phase, out=phase)
    solution: Field = np.fft.irfft2(spectrum, s=mirrored.shape)[:rows, :columns].astype(np.float32)
    return solution


def median_wavelength(field: Field) -> float:
    """Return the wavelength in cells above which half of the stretching energy of `field` lies."""
    rows, columns = field.shape
    frequency = np.hypot(np.fft.fftfreq(rows)[:, None], np.fft.rfftfreq(columns)[None, :])
    power = (np.abs(np.fft.rfft2(field)) * frequency) ** 2
    # Every column but the first stands for its mirror image too; the last may not, which is too little to matter.
    power[:, 1:] *= 2
    cells = max(rows, columns)
    bins = np.round(frequency * cells).astype(np.intp)
    cumulated = np.cumsum(np.bincount(bins.ravel(), weights=power.ravel()))
    median = int(np.searchsorted(cumulated, cumulated[-1] / 2))
    return float(cells / max(median, 1))


def relative_error(answer: Field, truth: Field) -> float:
    """Return the size of the difference relative to the size of the truth, both as root mean squares."""
    difference = np.subtract(answer, truth, dtype=np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(truth.astype(np.float64)))
