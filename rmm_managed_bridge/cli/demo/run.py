"""The work of the demo: prepare in NumPy, step in turn by CuPy and Warp, analyse in NumPy; one pool, no copy."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import rmm_managed_bridge as bridge
from rmm_managed_bridge.cli.demo.fields import SharedField, make_field
from rmm_managed_bridge.cli.demo.photograph import load_photograph, prepare_field
from rmm_managed_bridge.cli.demo.sampler import MemorySampler
from rmm_managed_bridge.cli.demo.stages import Plan, import_cupy, import_warp, make_plan
from rmm_managed_bridge.cli.demo.wave import (
    Check,
    Field,
    energy,
    exact_solution,
    first_step,
    median_wavelength,
    relative_error,
    rounding_limit,
    run_on_plain_numpy,
)
from rmm_managed_bridge.records import Snapshot
from rmm_managed_bridge.reports.timeline import MemorySample

__all__ = ["DemoResult", "run_demo"]

_CHECKPOINTS = 20


@dataclass(frozen=True)
class DemoResult:
    """What the demo found out. Its fields are copies; none of the shared fields is kept."""

    backend: str
    reason: str
    stage_names: tuple[str, ...]
    notes: tuple[str, ...]
    checks: tuple[Check, ...]
    views: tuple[tuple[str, dict[str, int]], ...]
    """Who made each field, and where every framework sees it."""
    initial: Field
    middle: Field
    final: Field
    wavelengths: tuple[float, float]
    """Median wavelength in cells, at first and at last."""
    stepping_s: float
    snapshot: Snapshot
    samples: tuple[MemorySample, ...]


@dataclass(frozen=True)
class _Stepped:
    current: SharedField
    middle: Field
    energies: tuple[float, ...]


def run_demo(size: int, steps: int, backend: str, on_step: Callable[[int], None]) -> DemoResult:
    """Run the demo and return what came out; checks are made, but left to the caller to judge.

    Parameters
    ----------
    size
        Cells along each side.
    steps
        Steps of time, at least 4.
    backend
        As :func:`rmm_managed_bridge.lifecycle.install` takes it.
    on_step
        Called with the number of each step that was made or enqueued.
    """
    has_warp = import_warp()
    import_cupy()
    photograph = load_photograph()
    # Before the bridge is there: the answer to compare with comes from memory that it never touched.
    initial = prepare_field(photograph, size)
    reference = run_on_plain_numpy(initial, steps)

    with bridge.install(backend=backend, initial_pool_size="512MiB", track="sites") as installed:
        bridge.reset_peak()
        plan = make_plan(installed.backend, has_warp=has_warp)
        with MemorySampler(_live_bytes) as sampler:
            sampler.mark("prepare")
            with bridge.tag("prepare"):
                fields = _prepare(prepare_field(photograph, size), plan)
            sampler.mark("step")
            start_s = time.perf_counter()
            with bridge.tag("step"):
                stepped = _step(fields, plan, steps, on_step)
            stepping_s = time.perf_counter() - start_s
            sampler.mark("analyse")
            with bridge.tag("analyse"):
                final = stepped.current.read()
                checks = _check(final, initial, reference, stepped.energies, steps)
                wavelengths = median_wavelength(initial), median_wavelength(final)
            snapshot = bridge.snapshot()
        return DemoResult(
            backend=installed.backend,
            reason=installed.reason,
            stage_names=tuple(stage.name for stage in plan.stages),
            notes=plan.notes,
            checks=checks,
            views=tuple((field.maker, field.addresses()) for field in fields),
            initial=initial,
            middle=stepped.middle,
            final=final.copy(),
            wavelengths=wavelengths,
            stepping_s=stepping_s,
            snapshot=snapshot,
            samples=sampler.samples,
        )


def _prepare(initial: Field, plan: Plan) -> tuple[SharedField, SharedField, SharedField]:
    """Return three fields in the pool, two of them filled by NumPy: at rest, and one step later."""
    first, second, third = (
        make_field(len(initial), maker, with_cupy=plan.with_cupy, warp_device=plan.warp_device) for maker in plan.makers
    )
    first.read()[...] = initial
    second.read()[...] = first_step(initial)
    for field in (first, second, third):
        field.require_one_block()
    return first, second, third


def _step(
    fields: tuple[SharedField, SharedField, SharedField], plan: Plan, steps: int, on_step: Callable[[int], None]
) -> _Stepped:
    """Let the stages step in turn; look at the energy now and then, and keep a copy of the state halfway."""
    previous, current, following = fields
    energies = [energy(previous.read(), current.read())]
    middle = current.numpy
    for number in range(2, steps + 1):
        plan.stages[number % len(plan.stages)].step(previous, current, following)
        previous, current, following = current, following, previous
        if number % max(1, steps // _CHECKPOINTS) == 0 or number == steps:
            with bridge.tag("analyse"):
                energies.append(energy(previous.read(), current.read()))
        if number == steps // 2:
            with bridge.tag("analyse"):
                middle = current.read().copy()
        on_step(number)
    return _Stepped(current=current, middle=middle, energies=tuple(energies))


def _check(
    final: Field, initial: Field, reference: Field, energies: tuple[float, ...], steps: int
) -> tuple[Check, ...]:
    limit = rounding_limit(steps)
    exact = exact_solution(initial, steps)
    drift = max(abs(value / energies[0] - 1) for value in energies)
    mean = abs(float(final.mean(dtype=np.float64))) / float(np.sqrt(np.square(initial).mean(dtype=np.float64)))
    return (
        Check("differs from plain NumPy, before the bridge, by", relative_error(final, reference), limit),
        Check("differs from the exact solution, by Fourier, by", relative_error(final, exact), limit),
        Check("energy drifts by", drift, limit),
        Check("mean displacement drifts by", mean, limit),
    )


def _live_bytes() -> dict[str, int]:
    return {name: usage.current_bytes for name, usage in bridge.stats().by("framework").items()}
