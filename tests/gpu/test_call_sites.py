"""Lines of what is allocated without the GIL: PyTorch's tensors, its own threads', and RMM's buffers."""

import pytest
from helpers.programs import run_on_gpu as run

_START = """
import rmm
import rmm_managed_bridge as bridge
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="256MiB", maximum_pool_size="512MiB")
def site_of(x):
    return bridge.allocation_of(x).site
"""


@pytest.mark.behaviour("P1")
@pytest.mark.requires("gpu")
@pytest.mark.requires("torch")
def test_tensors_have_the_line_that_made_them_and_autograds_threads_their_name() -> None:
    run(
        "import torch"
        + _START
        + """
bridge.install(frameworks=["torch"])
def make():
    return torch.empty(1 << 20, device="cuda", requires_grad=True)
weight = make()
assert site_of(weight)[:3] == ("<string>", 10, "make"), site_of(weight)
layer = torch.nn.Linear(1000, 1000, device="cuda")
site = site_of(layer.weight)
assert site[:2] == ("<string>", 13) and site.via.file.endswith("torch/nn/modules/linear.py"), site
(weight * weight).sum().backward()
assert str(site_of(weight.grad)).startswith("native thread pt_autograd"), site_of(weight.grad)
"""
    )


@pytest.mark.behaviour("P1")
@pytest.mark.requires("gpu")
def test_a_device_buffer_has_the_line_that_made_it() -> None:
    run(
        _START
        + """
bridge.install(frameworks=["numpy"])
def make():
    return rmm.DeviceBuffer(size=1 << 20)
buffer = make()
assert site_of(buffer)[:3] == ("<string>", 10, "make"), site_of(buffer)
"""
    )
