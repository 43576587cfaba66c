"""How the bridge reads a tensor's layout."""

import pytest
from helpers.programs import run_on_gpu as run

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("torch"), pytest.mark.requires("cupy")]


@pytest.mark.behaviour("I1")
def test_a_tensor_shows_the_layout_that_its_own_protocol_shows_and_a_lazy_one_is_refused() -> None:
    """What the bridge reads of a tensor directly is what its `__cuda_array_interface__` says."""
    run(
        """
import torch, rmm, numpy as np
import rmm_managed_bridge as bridge
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="256MiB", maximum_pool_size="1GiB")
import cupy, pytest
bridge.install(frameworks=["torch", "cupy"])
names = "bool uint8 int8 uint16 int16 int32 int64 float16 float32 float64 complex64 complex128".split()
for name in names:
    base = torch.zeros(4, 6, 2, device="cuda", dtype=getattr(torch, name))
    for tensor in (base, base[1:, ::2], base.transpose(0, 2), base[2, 3, 1], base[:0]):
        shown = tensor.__cuda_array_interface__
        view = bridge.as_numpy(tensor)
        assert (view.shape, view.dtype.str) == (tuple(shown["shape"]), shown["typestr"]), name
        if tensor.numel():
            assert view.ctypes.data == shown["data"][0]
            assert view.strides == tuple(s * tensor.element_size() for s in tensor.stride()), name
values = torch.ones(8, device="cuda", dtype=torch.complex64)
for lazy in (values.conj(), values.conj().imag):
    with pytest.raises(bridge.ViewError, match="resolve_conj"):
        bridge.as_numpy(lazy)
    with pytest.raises(bridge.ViewError, match="resolve_conj"):
        bridge.as_cupy(lazy)
    assert bridge.owns(lazy)
with pytest.raises(bridge.ViewError, match="detach"):
    bridge.as_numpy(torch.ones(8, device="cuda", requires_grad=True))
"""
    )
