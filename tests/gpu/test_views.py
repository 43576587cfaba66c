"""Zero-copy views between the real libraries."""

import gc

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy"), pytest.mark.requires("warp")]


@pytest.mark.behaviour("I1")
@pytest.mark.parametrize("maker", ["numpy", "cupy", "warp"])
def test_one_block_is_seen_by_all_three(bridge, cupy, warp, maker) -> None:
    source = {
        "numpy": lambda: np.zeros((256, 1024), "f4"),
        "cupy": lambda: cupy.zeros((256, 1024), "f4"),
        "warp": lambda: warp.zeros((256, 1024), dtype=warp.float32, device="cuda:0"),
    }[maker]()
    count = bridge.stats().current_count
    n, c, w = bridge.as_numpy(source), bridge.as_cupy(source), bridge.as_warp(source)
    assert n.ctypes.data == c.data.ptr == w.ptr
    assert bridge.stats().current_count == count
    assert bridge.owns(n) and bridge.owns(c) and bridge.owns(w)
    n[...] = 1
    c += 1  # on CuPy's stream; Warp's stream must see it
    w = bridge.as_warp(c)
    warp.copy(w, bridge.as_warp(cupy.full((256, 1024), 5, "f4")))
    assert (bridge.as_numpy(w) == 5).all()
    n = bridge.as_numpy(w)
    n[3, 7] = 11
    c = bridge.as_cupy(n)
    assert float(c[3, 7]) == 11 and float(c.sum()) == 5 * 256 * 1024 + 6


@pytest.mark.behaviour("I2")
def test_layouts_are_kept_or_refused(bridge, cupy) -> None:
    base = np.arange(64 * 48, dtype="f8").reshape(64, 48)
    layouts = {
        "C": base,
        "F": np.asfortranarray(base),
        "transposed": base.T,
        "reversed": base[::-1, ::-2],
        "sliced": base[3:60:7, 5:40:3],
        "0-d": base[3, 4:5].reshape(()),
        "from 1": base.ravel()[1:],
    }
    for name, view in layouts.items():
        device = bridge.as_cupy(view)
        assert device.shape == view.shape and device.strides == view.strides, name
        assert device.data.ptr == view.ctypes.data, name
        assert (cupy.asnumpy(device) == view).all(), name
        back = bridge.as_numpy(device)
        assert back.strides == view.strides and back.ctypes.data == view.ctypes.data, name
    assert bridge.as_cupy(base.ravel()[1:]).data.ptr == base.ctypes.data + 8


@pytest.mark.behaviour("I2")
def test_a_structured_array_and_its_fields_cross(bridge, cupy) -> None:
    records = np.zeros(1000, [("mass", "f4"), ("count", "i4")])
    records["mass"], records["count"] = 2.5, np.arange(1000)
    device = bridge.as_cupy(records)
    assert (device.data.ptr, device.dtype, device.strides) == (records.ctypes.data, records.dtype, records.strides)
    for name, offset in (("mass", 0), ("count", 4)):
        field = device[name]
        assert (field.data.ptr, field.strides) == (records.ctypes.data + offset, (8,))
        field += 1
        del field
    back = bridge.as_numpy(device)
    assert (back.ctypes.data, back.dtype, back.strides) == (records.ctypes.data, records.dtype, records.strides)
    assert (records["mass"] == 3.5).all() and (records["count"] == np.arange(1, 1001)).all()


@pytest.mark.behaviour("I4")
def test_a_view_does_not_own_its_data_and_its_base_holds_the_source(bridge, cupy, warp) -> None:
    sources = [
        np.arange(1000, dtype="f4")[1:],
        np.arange(1000, dtype="f4")[::-2],
        np.array(5.0),
        warp.ones(1000, dtype=warp.float32, device="cuda:0"),
    ]
    live = bridge.stats().current_count
    while sources:
        source = sources.pop()
        view = bridge.as_cupy(source)
        assert not view.flags.owndata and not view.flags["OWNDATA"]
        assert isinstance(view.base, cupy.ndarray) and view.base.flags.owndata
        assert view.base.data.mem is view.data.mem
        base = view.base
        del source, view
        gc.collect()
        # The base alone keeps the block.
        assert bridge.stats().current_count == live and bridge.owns(base)
        assert float(base.sum()) > 0
        del base
        gc.collect()
        live -= 1
        assert bridge.stats().current_count == live
    assert cupy.ones(10).flags.owndata


def test_asarray_of_a_pool_array_copies_as_ever(bridge, cupy) -> None:
    host = np.arange(1000, dtype="f4")
    copy = cupy.asarray(host)
    assert bridge.owns(copy) and not np.shares_memory(bridge.as_numpy(copy), host)
    assert copy.data.ptr != host.ctypes.data
    assert bridge.allocation_of(copy).serial != bridge.allocation_of(host).serial
    cupy.cuda.get_current_stream().synchronize()
    host[:] = -1
    assert (cupy.asnumpy(copy) == np.arange(1000)).all()
    copy += 1
    cupy.cuda.get_current_stream().synchronize()
    assert (host == -1).all()


@pytest.mark.behaviour("I2")
def test_what_cupy_cannot_express_is_refused(bridge) -> None:
    readonly = np.ones(10)
    readonly.flags.writeable = False
    for array, reason in (
        (readonly, "read-only"),
        (np.ones(10, ">f4"), "byte-swapped"),
        (np.array([None, 1]), "Python objects"),
    ):
        with pytest.raises(bridge.ViewError, match=reason):
            bridge.as_cupy(array)
        with pytest.raises(bridge.ViewError, match=reason):
            bridge.as_warp(array)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_arrays_without_elements_cross(bridge, cupy, warp, shape) -> None:
    assert bridge.as_cupy(np.empty(shape)).shape == shape
    assert bridge.as_numpy(cupy.empty(shape)).shape == shape
    assert bridge.as_warp(np.empty(shape)).shape == shape
    assert bridge.as_numpy(warp.empty(shape, dtype=warp.float32, device="cuda:0")).shape == shape


@pytest.mark.behaviour("I3")
def test_memory_that_is_not_ours_or_not_for_the_cpu_is_refused(bridge, cupy) -> None:
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        foreign = cupy.ones(1 << 18, "f4")
    with pytest.raises(TypeError, match="does not lie in a live block"):
        bridge.as_numpy(foreign)
    outside = np.frombuffer(bytearray(1 << 20), "f4")
    with pytest.raises(TypeError, match="does not lie in a live block"):
        bridge.as_cupy(outside)


@pytest.mark.behaviour("I3")
def test_device_memory_under_the_resource_is_refused_for_the_cpu(rmm_pool, cupy) -> None:
    import rmm_managed_bridge as bridge

    resource = bridge.ManagedBridgeResource(rmm_pool.mr.CudaMemoryResource(), maximum_pool_size="256MiB")
    assert resource.kind == "device"
    buffer = rmm_pool.DeviceBuffer(size=1 << 20, mr=resource)
    with pytest.raises(TypeError, match="which the CPU cannot reach"):
        bridge.as_numpy(buffer)


@pytest.mark.behaviour("I4")
def test_a_chain_of_views_keeps_the_block(bridge, cupy, warp) -> None:
    source = cupy.arange(1 << 18, dtype="f4")
    live = bridge.stats().current_count
    view = bridge.as_numpy(bridge.as_warp(bridge.as_numpy(source)))
    del source
    gc.collect()
    assert bridge.stats().current_count == live
    assert not view.flags.owndata and view[77] == 77
    with pytest.raises(ValueError, match="resize"):
        view.resize(10)
    cycle = [bridge.as_cupy(view)]
    cycle.append(cycle)
    del view, cycle
    gc.collect()
    assert bridge.stats().current_count == live - 1


def test_a_view_of_a_device_buffer(bridge, rmm_pool) -> None:
    buffer = rmm_pool.DeviceBuffer.to_device(bytes(range(256)) * 16)
    assert (bridge.as_numpy(buffer)[:256] == np.arange(256)).all()
