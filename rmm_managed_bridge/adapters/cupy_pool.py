"""CuPy's own calls about its memory pool, while CuPy allocates from the bridge."""

from typing import Any

from rmm_managed_bridge import overview
from rmm_managed_bridge._native import pool as native_pool
from rmm_managed_bridge.errors import warn_user


class DefaultPool:
    """What `cupy.get_default_memory_pool()` gives: CuPy's pool, with what the bridge holds for CuPy counted in.

    Programs ask it how much is in use, and to let go of what is not. Its own answers would be of a pool that serves
    nobody. All else is CuPy's pool's, for which it also passes in `isinstance`.
    """

    def __init__(self, cupy: Any, theirs: Any) -> None:
        self._cupy = cupy
        self._theirs = theirs

    def free_all_blocks(self, stream: Any = None) -> None:
        """Give back what is free in CuPy's pool, and in those of the bridge, as `trim` does."""
        self._theirs.free_all_blocks(stream)
        overview.trim()

    def used_bytes(self) -> int:
        """Return the bytes of CuPy's arrays on the current device."""
        return int(self._theirs.used_bytes()) + overview.live_bytes_of("cupy", self._device())

    def free_bytes(self) -> int:
        """Return what is held on the current device, and used by no framework."""
        device = self._device()
        here = [pool for pool in native_pool.pools() if pool.device == device]
        return int(self._theirs.free_bytes()) + sum(max(pool.numbers[0] - pool.live_bytes, 0) for pool in here)

    def total_bytes(self) -> int:
        """Return what is held on the current device, for all frameworks."""
        return int(self._theirs.total_bytes()) + overview.reserved_bytes_on(self._device())

    def set_limit(self, *args: Any, **kwargs: Any) -> None:
        """Set the limit of CuPy's own pool, and say that it bounds nothing now."""
        self._theirs.set_limit(*args, **kwargs)
        warn_user(
            "set_limit() bounds CuPy's own pool, and CuPy allocates from the bridge: use "
            "install(maximum_pool_size=...), or tag(name, limit=...) for a part of the program"
        )

    def _device(self) -> int:
        return int(self._cupy.cuda.runtime.getDevice())

    @property  # type: ignore[misc]  # for isinstance alone: nobody sets it
    def __class__(self) -> Any:
        return type(self._theirs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)


class DefaultPoolCall:
    """Stands in front of `cupy.get_default_memory_pool`."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._theirs: Any = None
        self._mine: Any = None

    def put(self) -> None:
        """Take the function's place."""
        theirs = self._cupy.get_default_memory_pool
        mine = DefaultPool(self._cupy, theirs())

        def get_default_memory_pool() -> Any:
            return mine

        get_default_memory_pool.__doc__ = theirs.__doc__
        self._theirs, self._mine = theirs, get_default_memory_pool
        self._cupy.get_default_memory_pool = get_default_memory_pool

    def take_away(self) -> None:
        """Put the function back, unless somebody else took the place since."""
        if self._mine is not None and self._cupy.get_default_memory_pool is self._mine:
            self._cupy.get_default_memory_pool = self._theirs
        self._mine = None
