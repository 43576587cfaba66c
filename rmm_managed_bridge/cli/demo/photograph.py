"""The initial displacement of the demo: a photograph that ships with scikit-image."""

from importlib.resources import as_file, files

import numpy as np
import numpy.typing as npt

from rmm_managed_bridge.errors import BridgeError

__all__ = ["load_photograph", "prepare_field"]

_CELLS_PER_SMOOTHING = 256


def load_photograph() -> npt.NDArray[np.float32]:
    """Return the photograph `camera.png` of scikit-image, read from disk, as brightness from 0 to 1.

    Raises
    ------
    BridgeError
        If scikit-image or the image reader is not installed.
    """
    try:
        from matplotlib.image import imread

        # The file itself, not skimage.data.camera(): that one may go to the network for what it does not find.
        with as_file(files("skimage") / "data" / "camera.png") as path:
            pixels = imread(path)
    except (ImportError, OSError) as error:
        raise BridgeError(
            f"the demo starts from a photograph in scikit-image, which cannot be read ({error}); "
            'run: pip install "rmm-managed-bridge[demo]"'
        ) from error
    return np.asarray(pixels, np.float32)


def prepare_field(photograph: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """Return the photograph as a displacement on `size` x `size` cells: resized, smoothed, zero on average.

    Smoothing takes out what the grid cannot carry: waves a few cells long travel at the wrong speed.
    """
    field = _resize(_resize(photograph, size).T, size).T
    # A copy in C order with its own memory, so that every framework can look at it.
    field = np.array(field, np.float32, order="C")
    for _ in range(max(1, size // _CELLS_PER_SMOOTHING)):
        for along in (field, field.T):
            flow = along[1:] - along[:-1]
            flow *= 0.25
            along[:-1] += flow
            along[1:] -= flow
    field -= field.mean(dtype=np.float64)
    return field


def _resize(image: npt.NDArray[np.float32], rows: int) -> npt.NDArray[np.float32]:
    """Return `image` with `rows` rows, linearly interpolated."""
    position = np.linspace(0, image.shape[0] - 1, rows)
    lower = np.minimum(position.astype(np.intp), image.shape[0] - 2)
    weight = (position - lower).astype(np.float32)[:, None]
    resized: npt.NDArray[np.float32] = image[lower] * (1 - weight) + image[lower + 1] * weight
    return resized
