"""DLPack between the real libraries, with and without `as_dlpack`."""

import gc

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]
COUNT = 1 << 20


@pytest.mark.behaviour("I1")
@pytest.mark.parametrize("wrapped", [False, True])
def test_numpy_takes_a_cupy_array_of_the_pool(bridge, cupy, slow, wrapped) -> None:
    array = cupy.zeros(COUNT, "f4")
    before = bridge.stats().total_bytes
    slow.fill(array, 3)
    view = np.from_dlpack(bridge.as_dlpack(array) if wrapped else array, device="cpu")
    assert view.ctypes.data == array.data.ptr
    assert (view == 3).all()
    assert bridge.owns(view)
    assert bridge.stats().total_bytes - before < array.nbytes, "something was copied"
    view[5] = 7
    assert float(array[5]) == 7


@pytest.mark.behaviour("I1")
def test_an_export_waits_also_where_cupy_does_not(bridge, cupy, slow, streams) -> None:
    array = cupy.zeros(COUNT, "f4")
    bridge.record_stream(array, side := streams())
    with side:
        slow.fill(array, 3)
    assert (np.from_dlpack(bridge.as_dlpack(array)) == 3).all()


@pytest.mark.behaviour("I1")
def test_cupy_takes_a_numpy_array_of_the_pool(bridge, cupy, slow) -> None:
    array = np.ones(COUNT, "f4")
    with pytest.raises(TypeError):
        cupy.from_dlpack(array)
    on_device = cupy.from_dlpack(bridge.as_dlpack(array))
    assert on_device.data.ptr == array.ctypes.data
    on_device += 1
    assert (bridge.as_numpy(on_device) == 2).all()
    # The block waits for CuPy's work when both arrays go.
    slow.fill(on_device, 9)
    del array, on_device
    gc.collect()
    for _ in range(20):
        fresh = np.zeros(COUNT, "f4")
        assert not fresh.any()
    cupy.cuda.runtime.deviceSynchronize()
    assert not fresh.any()


@pytest.mark.behaviour("I2")
def test_layouts_survive_the_export(bridge, cupy) -> None:
    base = np.arange(64 * 48, dtype="f8").reshape(64, 48)
    for view in (base, base.T, base[3:60:7, 5:40:3], base.ravel()[1:], base[3, 4:5].reshape(())):
        on_device = cupy.from_dlpack(bridge.as_dlpack(view))
        assert (on_device.shape, on_device.strides) == (view.shape, view.strides)
        assert on_device.data.ptr == view.ctypes.data
        assert (cupy.asnumpy(on_device) == view).all()
    assert cupy.from_dlpack(bridge.as_dlpack(base.ravel()[1:])).data.ptr == base.ctypes.data + 8


@pytest.mark.behaviour("I3")
@pytest.mark.requires("torch")
def test_pytorch_takes_a_managed_block_by_dlpack_or_by_the_array_interface(bridge, cupy) -> None:
    import torch

    array = np.arange(COUNT, dtype="f4")
    tensor = torch.as_tensor(bridge.as_cupy(array), device="cuda")
    assert tensor.data_ptr() == array.ctypes.data
    try:
        shared = torch.from_dlpack(bridge.as_dlpack(array))
    except Exception as error:  # a version that does not know device type 13: refused, and the process lives
        print(f"torch.from_dlpack refuses managed memory: {error!r}")
    else:
        assert shared.data_ptr() == array.ctypes.data
        del shared
    tensor += 1
    torch.cuda.synchronize()
    assert (array[:5] == [1, 2, 3, 4, 5]).all()
    del tensor
    gc.collect()
