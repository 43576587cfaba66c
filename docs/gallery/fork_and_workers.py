"""A forked child reads what its parent made in host memory; its own arrays are plain memory."""

import os

import numpy as np

import rmm_managed_bridge as bridge

bridge.install(initial_pool_size="256MiB", frameworks=["numpy"])

with bridge.numpy_allocator("host"):  # what a child may read, whatever the backend
    table = np.arange(1000.0)

child = os.fork()
if child == 0:
    inherited = table.sum() == 499_500
    plain = not bridge.owns(np.ones(1000))
    os._exit(0 if inherited and plain else 1)

_, state = os.waitpid(child, 0)
print("child read its parent's array:", os.waitstatus_to_exitcode(state) == 0)
