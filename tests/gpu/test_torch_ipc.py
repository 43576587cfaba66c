"""IPC handles of pool memory through PyTorch itself: one clear error, whichever way they are asked for: D6."""

import os

import pytest
from helpers.programs import must_succeed, run_python

pytestmark = [pytest.mark.requires("gpu", "torch"), pytest.mark.behaviour("D6")]

START = """
import multiprocessing.reduction, os, sys
import numpy as np, rmm, torch, torch.multiprocessing
import rmm_managed_bridge as bridge

rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="256MiB", maximum_pool_size="1GiB")


def refused(tensor):
    before = tensor.clone()
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    for ask in (
        tensor.untyped_storage()._share_cuda_,
        tensor[10:].untyped_storage()._share_cuda_,
        lambda: multiprocessing.reduction.ForkingPickler.dumps(tensor),
        lambda: queue.put(tensor),
    ):
        try:
            ask()
        except bridge.AccessError as error:
            assert "CUDA cannot export managed memory" in str(error), error
        else:
            raise AssertionError("exported")
    torch.cuda.synchronize()  # no error is left behind
    assert torch.equal(tensor, before)
"""


def run(program: str) -> None:
    """Run a program that sees the GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    result = run_python(
        START + program, options=("-W", "ignore"), environment={"CUDA_VISIBLE_DEVICES": visible}, timeout=240
    )
    must_succeed(result)


def test_a_tensor_of_the_allocator_is_refused_also_after_uninstall() -> None:
    run(
        """
bridge.install(frameworks=["numpy", "torch"])
tensor = torch.arange(1 << 20, device="cuda")
refused(tensor)
refused(bridge.as_torch(np.arange(1 << 20)))
bridge.uninstall()
refused(tensor)
"""
    )


def test_a_tensor_in_a_memory_pool_is_refused_and_pytorchs_own_is_exported() -> None:
    run(
        """
bridge.install(frameworks=["numpy"])
with torch.cuda.use_mem_pool(bridge.torch_mempool()):
    tensor = torch.arange(1 << 20, device="cuda")
theirs = torch.arange(1 << 20, device="cuda")
assert bridge.owns(tensor) and not bridge.owns(theirs)
refused(tensor)
try:
    assert theirs.untyped_storage()._share_cuda_()
except RuntimeError as error:  # a container may forbid it: then it is PyTorch's own error that arrives
    assert not isinstance(error, bridge.BridgeError), error
sys.stdout.flush()
os._exit(0)  # PyTorch says at its exit that nobody has opened what it exported
"""
    )


def test_a_view_without_pytorch_hooked_is_refused() -> None:
    run(
        """
bridge.install(frameworks=["numpy"])
refused(bridge.as_torch(np.arange(1 << 20)))
"""
    )
