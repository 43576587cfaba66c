"""One array in NumPy and in a framework of the device: the same bytes, and nothing is copied."""

import numpy as np
import warp as wp

import rmm_managed_bridge as bridge

bridge.install(initial_pool_size="256MiB")


@wp.kernel
def double(values: wp.array(dtype=wp.float32)):
    i = wp.tid()
    values[i] = values[i] * 2.0


field = np.arange(1000, dtype=np.float32)
shared = bridge.as_warp(field)  # on the device, or on the CPU where there is none
wp.launch(double, dim=len(field), inputs=[shared], device=shared.device)

print(bridge.as_numpy(shared)[:4])  # waits for the kernel
print(shared.ptr == field.ctypes.data, bridge.memory_kind(shared))
