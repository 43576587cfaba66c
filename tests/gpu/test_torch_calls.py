"""PyTorch's own calls about its memory tell of the bridge once it is the allocator."""

import pytest
from helpers.programs import run_on_gpu


@pytest.mark.requires("gpu", "torch")
@pytest.mark.behaviour("U1")
def test_counters_answer_and_the_cache_goes_back() -> None:
    run_on_gpu("""
        import torch
        import rmm_managed_bridge as bridge

        bridge.install("managed", initial_pool_size="256MiB", frameworks=["torch"])
        x = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
        for device in (None, 0, "cuda:0", torch.device("cuda"), x.device):
            assert torch.cuda.memory_allocated(device) == 8 << 20, device
        assert torch.cuda.memory_reserved() >= 8 << 20
        del x
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() == 0
    """)
