"""Work on a stream that the bridge was told of: memory is not used again before it has ended."""

import numpy as np

import rmm_managed_bridge as bridge

bridge.install(initial_pool_size="256MiB")
x = np.ones(1 << 20, np.float32)

if bridge.status().devices:
    import cupy

    side = cupy.cuda.Stream(non_blocking=True)
    shared = bridge.as_cupy(x)
    bridge.record_stream(shared, side)  # before it is dropped, or handed to the CPU
    with side:
        shared *= 2

print(bridge.as_numpy(x)[:3])  # waits for the streams that used it
bridge.synchronize()  # waits for all that the bridge holds
