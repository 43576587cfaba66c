"""A limit for one step, a callback that makes room, and an error that says who holds the memory."""

import numpy as np

import rmm_managed_bridge as bridge

cache = [np.ones(0)]


def drop_cache(size_bytes: int, attempt: int) -> bool:
    """Let one entry go; false where there is none left."""
    if not cache:
        return False
    cache.pop()
    return True


bridge.install(initial_pool_size="64MiB", maximum_pool_size="64MiB", on_oom=drop_cache)
cache.extend(np.ones(1 << 20) for _ in range(4))

big = np.ones(5 << 20)  # 40 MiB: there is room once the cache has let go
print(len(cache), "entries left in the cache")
del big

try:
    with bridge.tag("load", limit="8MiB"):
        table = np.ones(4 << 20)
except MemoryError as error:
    print(error, *getattr(error, "__notes__", []), sep="\n")
