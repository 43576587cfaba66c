"""Which frameworks one bridge has hooked, and why not the others."""

import sys
from collections.abc import Callable, Sequence

from rmm_managed_bridge.adapters.cupy import CupyAdapter
from rmm_managed_bridge.adapters.numpy import NumpyAdapter
from rmm_managed_bridge.adapters.torch import TorchAdapter, serve
from rmm_managed_bridge.adapters.warp import WarpAdapter
from rmm_managed_bridge.arrays.ipc import guard_torch
from rmm_managed_bridge.config import BridgeConfig
from rmm_managed_bridge.errors import FrameworkError
from rmm_managed_bridge.frameworks.registry import HOOKED
from rmm_managed_bridge.lifecycle.pools import Pools

Adapter = NumpyAdapter | CupyAdapter | WarpAdapter | TorchAdapter


class Hooks:
    """The adapters of one bridge. Every call is made under `install`'s lock.

    Attributes
    ----------
    states : dict of str to str
        For each framework that was tried ``"hooked"``, or why it is not.
    numpy_asked : bool
        Somebody named NumPy: then it is put on managed memory also where that costs it something.
    """

    def __init__(self, pools: Pools, config: BridgeConfig) -> None:
        self._pools = pools
        self._config = config
        self._adapters: dict[str, Adapter] = {}
        self.states: dict[str, str] = {}
        self.numpy_asked = False

    @property
    def numpy(self) -> NumpyAdapter | None:
        adapter = self._adapters.get("numpy")
        return adapter if isinstance(adapter, NumpyAdapter) else None

    def hook(self, names: Sequence[str], *, required: bool) -> None:
        """Hook frameworks that are not hooked yet: all of them, or, if one that is required fails, none.

        `required`: somebody named them.
        """
        if "numpy" not in self._adapters:
            self.numpy_asked = required and "numpy" in names
        hooked: list[str] = []
        states = dict(self.states)
        try:
            for name in sorted(names, key=lambda name: name == "torch"):  # last: it cannot be undone
                if name in self._adapters:
                    continue
                try:
                    self._hook_one(name)
                    hooked.append(name)
                except FrameworkError as error:
                    if required:
                        raise
                    self.states[name] = str(error)
        except BaseException:
            for name in reversed(hooked):
                self._adapters.pop(name).unhook()
            self.states = states
            raise

    def hook_imported(self) -> None:
        """Hook NumPy and what the program has imported, as far as that can be undone."""
        if (torch := sys.modules.get("torch")) is not None:
            self.states["torch"] = "its allocator cannot be changed back, so it is hooked only if it is named"
            if hasattr(torch, "UntypedStorage"):  # not where its import goes on
                guard_torch(torch)  # tensors over pool memory come from views, and from other libraries
        names = [name for name in HOOKED if name == "numpy" or (name in sys.modules and name != "torch")]
        self.hook(names, required=False)

    def unhook(self) -> list[str]:
        """Put every framework back. Return what could not be, in words."""
        complaints = []
        for name in reversed(list(self._adapters)):
            complaint = self._adapters.pop(name).unhook()
            if complaint is not None:
                complaints.append(complaint)
        return complaints

    def move(self) -> None:
        """Let every hook serve from the pools as they are now."""
        for adapter in self._adapters.values():
            if isinstance(adapter, NumpyAdapter):
                adapter.move(self._pools.pool_for_numpy(asked=self.numpy_asked))
            else:
                adapter.move(self._pools.by_device)
        serve(self._pools.by_device)

    def enter_block(self, *, hooked_it: bool) -> Callable[[], str | None]:
        """Let the current context's NumPy take part in a ``with`` block; returns what ends that."""
        numpy = self.numpy
        return (lambda: None) if numpy is None else numpy.enter_block(hooked_it=hooked_it)

    def _hook_one(self, name: str) -> None:
        adapter = self._make(name)
        adapter.hook()
        self._adapters[name] = adapter
        self.states[name] = "hooked"

    def _make(self, name: str) -> Adapter:
        pools, config = self._pools, self._config
        if name == "numpy":
            return NumpyAdapter(
                pools.pool_for_numpy(asked=self.numpy_asked), config.numpy_min_bytes, config.numpy_scope
            )
        if name == "cupy":
            return CupyAdapter(pools.by_device)
        if name == "torch":
            return TorchAdapter(pools.by_device, pools.resources)
        return WarpAdapter(pools.by_device)
