"""Which line holds the memory, which held it at the peak, and which lines grew."""

import numpy as np

import rmm_managed_bridge as bridge

bridge.install(initial_pool_size="256MiB")
before = bridge.snapshot()

with bridge.tag("load"):
    table = np.ones((1000, 1000))
with bridge.tag("smooth"):
    smooth = (table[1:] + table[:-1]) / 2

print(bridge.allocation_of(table[10:]))  # of a slice, too
print(bridge.stats().by("tag"))
print(bridge.snapshot().compare(before))
print(bridge.snapshot().peak.top(3))
