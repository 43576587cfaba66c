"""CuPy arrays over memory of the bridge."""

from typing import TYPE_CHECKING, Any

from rmm_managed_bridge._native.blocks import Block, KnownArray
from rmm_managed_bridge.arrays.access import check_hand_over
from rmm_managed_bridge.arrays.layout import require_device
from rmm_managed_bridge.frameworks.registry import CUPY
from rmm_managed_bridge.views.common import described, import_framework, lend_to

if TYPE_CHECKING:
    import cupy


def as_cupy(x: Any, *, allow_readonly: bool = False) -> "cupy.ndarray":
    """Return a CuPy array over the memory of `x`, for use on CuPy's current stream.

    Parameters
    ----------
    x
        A NumPy array, Warp array or other array in memory of the bridge that the device can reach; or
        a column of pandas, polars or Arrow that is one array.
    allow_readonly : bool
        Show a read-only array too. The library cannot know, and a kernel that writes there breaks what made it
        read-only: pandas shares one column between data frames, and all of them change.

    Returns
    -------
    cupy.ndarray
        With the shape, strides and dtype of `x`, on the device of its pool. It does not own its data (``OWNDATA`` is
        False) and keeps `x` alive, by way of its ``.base``.

    Raises
    ------
    ViewError
        A `TypeError` too: if the memory is not the bridge's or no device reaches it; if the array is read-only, which
        CuPy cannot express; if its dtype is byte-swapped or holds Python objects.
    BridgeError
        If CuPy's current stream is being captured.

    Notes
    -----
    Kernels enqueued on the current stream from now on come after the device work on the block so far. Work of the CPU
    needs no order: it is done when this is called. When the block is freed later, it waits for the stream that is
    current now and for the one that is current when the view goes away.

    The hints in use (`using_hints`, `tag`, `install`) are given on the current stream before this returns.

    Examples
    --------
    >>> field = np.ones(1000, np.float32)
    >>> if bridge.status().devices:  # on a GPU
    ...     shared = bridge.as_cupy(field)
    ...     shared *= 2
    """
    cupy = import_framework("cupy")
    check_hand_over(cupy.cuda.Device, x)
    if isinstance(x, cupy.ndarray):
        return x
    array = described(x, "CuPy", allow_readonly=allow_readonly)
    if array.size_bytes == 0:
        return cupy.empty(array.shape, array.dtype)
    block = require_device(array)
    if cupy.cuda.runtime.getDevice() == block.device:
        return _view(cupy.cuda, array, block)
    with cupy.cuda.Device(block.device):
        return _view(cupy.cuda, array, block)


def _view(cuda: Any, array: KnownArray, block: Block) -> "cupy.ndarray":
    import cupy

    loan = lend_to(array, block.device, CUPY)
    memory = cuda.UnownedMemory(block.start, block.size_bytes, loan, block.device)
    pointer = cuda.MemoryPointer(memory, array.ptr - block.start)
    # What CuPy makes from a pointer has no base, and so says that it owns its data; a view of that does not.
    return cupy.ndarray(array.shape, array.dtype, pointer, strides=array.strides).view()
