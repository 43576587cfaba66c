"""Who steps the wave: NumPy, CuPy and Warp, each on its own view of the same fields."""

import importlib.util
from dataclasses import dataclass, field
from typing import Any, Protocol

import rmm_managed_bridge as bridge
from rmm_managed_bridge.cli.demo.fields import SharedField
from rmm_managed_bridge.cli.demo.wave import COURANT_SQUARED, step

__all__ = ["Plan", "Stage", "import_cupy", "import_warp", "make_plan"]


class Stage(Protocol):
    """Something that can do one step."""

    @property
    def name(self) -> str:
        """What to call it in a report."""

    def step(self, previous: SharedField, current: SharedField, following: SharedField) -> None:
        """Write or enqueue one step into `following`."""


@dataclass(frozen=True)
class NumpyStage:
    """Steps on the CPU, in Python."""

    name: str = "NumPy"

    def step(self, previous: SharedField, current: SharedField, following: SharedField) -> None:
        """Write one step into `following`, after the device has finished with all three."""
        step(previous.read(), current.read(), following.read())


@dataclass(frozen=True)
class CupyStage:
    """Steps on the GPU, by CuPy's elementwise kernels, on one stream."""

    stream: Any
    name: str = "CuPy"

    def step(self, previous: SharedField, current: SharedField, following: SharedField) -> None:
        """Enqueue one step into `following`."""
        with self.stream:
            step(previous.cupy, current.cupy, following.cupy)


@dataclass(frozen=True)
class WarpStage:
    """Steps by one Warp kernel, on the GPU or on the CPU."""

    device: str

    @property
    def name(self) -> str:
        """Warp and where it runs."""
        return f"Warp on {self.device}"

    def step(self, previous: SharedField, current: SharedField, following: SharedField) -> None:
        """Enqueue one step into `following`; on the CPU it is done on return."""
        from rmm_managed_bridge.cli.demo.kernel import launch_step

        launch_step(previous.warp, current.warp, following.warp, COURANT_SQUARED)


@dataclass(frozen=True)
class Plan:
    """Which frameworks take part: they step in turn, and each of `makers` allocates one of the three fields."""

    stages: tuple[Stage, ...]
    makers: tuple[str, str, str]
    with_cupy: bool
    warp_device: str | None
    notes: tuple[str, ...] = field(default=())


def import_warp() -> bool:
    """Import Warp and tell it to be quiet; return whether it is there."""
    if importlib.util.find_spec("warp") is None:
        return False
    import warp

    warp.config.log_level = warp.LOG_WARNING
    return True


def import_cupy() -> None:
    """Import CuPy where there is a device for it: the bridge hooks what is imported."""
    if importlib.util.find_spec("cupy") is not None and bridge.detect_backend()[0] != "host":
        importlib.import_module("cupy")


def make_plan(backend: str, *, has_warp: bool) -> Plan:
    """Decide who takes part on `backend`, and why somebody does not; the bridge must be installed.

    Compiles the Warp kernel, so that no step waits for it.
    """
    status = bridge.status()
    on_gpu = backend != "host"
    notes = []
    warp_device = None
    if has_warp:
        from rmm_managed_bridge.cli.demo.kernel import prepare_kernel

        warp_device = f"cuda:{status.devices[0]}" if on_gpu else "cpu"
        prepare_kernel(warp_device)
    else:
        notes.append('Warp is not installed, so the array stage does every step; run: pip install "warp-lang"')

    with_cupy = on_gpu and status.frameworks.get("cupy") == "hooked"
    if not with_cupy:
        why = status.frameworks.get("cupy", "not hooked") if on_gpu else f"the {backend} backend has no GPU"
        notes.append(f"NumPy stands in for CuPy: {why}")
    array_stage: Stage = CupyStage(_cupy_stream(warp_device)) if with_cupy else NumpyStage()
    return Plan(
        stages=(array_stage, WarpStage(warp_device)) if warp_device else (array_stage,),
        makers=("numpy", "cupy" if with_cupy else "numpy", "warp" if warp_device else "numpy"),
        with_cupy=with_cupy,
        warp_device=warp_device,
        notes=tuple(notes),
    )


def _cupy_stream(warp_device: str | None) -> Any:
    """Return a CuPy stream that is ordered with Warp's kernels, because it is Warp's own."""
    import cupy

    if warp_device is None:
        return cupy.cuda.get_current_stream()
    import warp

    return cupy.cuda.Stream.from_external(warp.get_stream(warp_device))
