"""The Warp kernel of the demo. Imported only where Warp is installed."""

from typing import Any, no_type_check

import warp as wp

__all__ = ["launch_step", "prepare_kernel"]


@wp.kernel
@no_type_check  # Warp's language, not Python: the annotations name kernel types, and tid() returns as many as asked.
def _wave_step(
    previous: wp.array2d[wp.float32],
    current: wp.array2d[wp.float32],
    following: wp.array2d[wp.float32],
    courant_squared: wp.float32,
) -> None:
    row, column = wp.tid()
    last_row = current.shape[0] - 1
    last_column = current.shape[1] - 1
    here = current[row, column]
    # Beyond a wall a cell is its own neighbour: no difference, so no flux.
    curvature = current[wp.max(row - 1, 0), column] - here
    curvature += current[wp.min(row + 1, last_row), column] - here
    curvature += current[row, wp.max(column - 1, 0)] - here
    curvature += current[row, wp.min(column + 1, last_column)] - here
    following[row, column] = here - previous[row, column] + here + courant_squared * curvature


def prepare_kernel(device: str) -> None:
    """Compile the kernel for `device`, or load it from Warp's cache, before anything is timed."""
    wp.load_module(module=__name__, device=device)


def launch_step(previous: Any, current: Any, following: Any, courant_squared: float) -> None:
    """Enqueue one leapfrog step over three Warp arrays, on the current stream of their device."""
    wp.launch(
        _wave_step,
        dim=current.shape,
        inputs=[previous, current, following, courant_squared],
        device=current.device,
    )
