"""Say where memory is wanted: by a preset for a part of the program, and by hand."""

import numpy as np

import rmm_managed_bridge as bridge

bridge.install(initial_pool_size="256MiB")
field = np.ones(1 << 22, np.float32)

with bridge.using_hints("host"):  # one pass over data of the CPU: it need not move
    if bridge.status().devices:
        import cupy

        shared = bridge.as_cupy(field)
        cupy.multiply(shared, 2, out=shared)
    print(bridge.as_numpy(field).mean())

done = bridge.prefetch(field, "cpu")
print(done)  # without a GPU: skipped, and why
print(bridge.residency(field))
