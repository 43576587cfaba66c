"""The life of a bridge: install, uninstall, and what happens when RMM is re-initialised in between."""

import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rmm_managed_bridge import machine, overview
from rmm_managed_bridge._native import pressure
from rmm_managed_bridge._native import process as native_process
from rmm_managed_bridge.adapters.torch import serve
from rmm_managed_bridge.config import BridgeConfig, Hints, read_config
from rmm_managed_bridge.config.defaults import signature_with_defaults
from rmm_managed_bridge.errors import BackendError, BridgeWarning, InstallError, shown, warn_user
from rmm_managed_bridge.hints import policy
from rmm_managed_bridge.lifecycle import forks, reinitialize
from rmm_managed_bridge.lifecycle.call_site_filter import set_file_rules
from rmm_managed_bridge.lifecycle.hooks import Hooks
from rmm_managed_bridge.lifecycle.pools import HostPools, Pools, RmmPools, describe_survivors
from rmm_managed_bridge.lifecycle.recorder import record_if_asked
from rmm_managed_bridge.records import Status
from rmm_managed_bridge.units import format_bytes

if TYPE_CHECKING:
    from rmm_managed_bridge.lifecycle.resource import ManagedBridgeResource

_log = logging.getLogger("rmm_managed_bridge")
_lock = threading.RLock()
_bridge: "Bridge | None" = None


_inherited: "list[Bridge]" = []
"""In a forked child: the bridge of its parent, which is kept as it is."""


def _leave_bridge_to_parent() -> None:
    """In a forked child: a thread that held the lock is not there to let it go, and the pools are the parent's."""
    global _lock, _bridge
    _lock = threading.RLock()
    if _bridge is None:
        return
    _inherited.append(_bridge)
    if (numpy := _bridge._hooks.numpy) is not None:
        numpy.unhook()
    _bridge = None
    pressure.on_oom = None
    overview.note_installed(overview.NOT_INSTALLED)
    policy.set_installed(Hints.none)


os.register_at_fork(after_in_child=_leave_bridge_to_parent)


class Bridge:
    """What is installed. Made by `install`; usable in ``with``, which uninstalls at the end.

    Attributes
    ----------
    backend : str
        ``"managed"``, ``"system"`` or ``"host"``.
    reason : str
        Why this backend.
    devices : tuple of int
        Devices with a pool; empty on ``"host"``.

    Examples
    --------
    >>> bridge.uninstall()
    >>> with bridge.install("host") as installed:
    ...     print(installed.backend, installed.devices)
    host ()
    """

    def __init__(self, config: BridgeConfig) -> None:
        self.config = config
        self._pools: Pools = _make_pools(config)
        self.backend = self._pools.backend
        self.reason = self._pools.reason
        self._hooks = Hooks(self._pools, config)
        self._block_count = 0  # `with installed():` that are open; under _lock
        self._ends_with_blocks = False

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(self._pools.by_device)

    @property
    def resources(self) -> "dict[int, ManagedBridgeResource]":
        """The RMM resource of each device."""
        return dict(self._pools.resources)

    def uninstall(self) -> None:
        """Undo `install`; see `rmm_managed_bridge.uninstall`."""
        with _lock:
            if _bridge is self:
                _uninstall(self)

    def __enter__(self) -> Self:
        if _bridge is not self:
            raise InstallError("this bridge was uninstalled; call install() again, or use `with installed(...)`")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()

    def _enter_block(self, *, made_it: bool) -> Callable[[], None]:
        """Open a ``with`` block. Returns what closes it: the last to close ends a bridge that a block has made."""
        self._block_count += 1
        self._ends_with_blocks = self._ends_with_blocks or made_it
        leave = self._hooks.enter_block(hooked_it=made_it)

        def close() -> None:
            with _lock:
                complaint = leave()
                self._block_count -= 1
                if self._ends_with_blocks and self._block_count == 0:
                    self.uninstall()
            if complaint is not None:
                warn_user(f"the end of installed(): {complaint}")

        return close

    def __repr__(self) -> str:
        if _bridge is not self:
            return f"<Bridge: {self.backend}, not installed>"
        where = ", ".join(f"cuda:{device}" for device in self.devices) or "host"
        hooked = ", ".join(name for name, how in self._hooks.states.items() if how == "hooked") or "nothing"
        return f"<Bridge: {self.backend} on {where}, hooked: {hooked}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the `Status` of this process: pools stay where they are."""
        return _as_it_is, (overview.status(),)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def _publish(self) -> None:
        overview.note_installed(
            Status(
                installed=True,
                backend=self.backend,
                reason=self.reason,
                devices=self.devices,
                frameworks=dict(self._hooks.states),
                numpy_scope=None if self._hooks.numpy is None else self.config.numpy_scope,
                track=self.config.track,
                hints=str(self.config.hints),
                hugepages=self.config.hugepages,
                fork=self.config.fork,
                notes=_notes(self.backend, self.config),
            )
        )

    def _before_reinitialize(self, devices: Sequence[int]) -> None:
        retiring = [pool for pool in self._pools.all_pools() if pool.device < 0 or pool.device in devices]
        survivors = describe_survivors(retiring)
        if survivors is not None:
            warnings.warn(BridgeWarning(f"rmm.reinitialize retires a pool that is in use: {survivors}"), stacklevel=5)

    def _after_reinitialize(self, devices: Sequence[int]) -> None:
        """Attach to what RMM set, on every device that was served."""
        try:
            self._pools.renew(devices)
        except Exception as error:
            _uninstall(self)
            raise InstallError(
                f"rmm.reinitialize changed the memory under the bridge, which was uninstalled: {error}"
            ) from error
        self._hooks.move()
        self._publish()


def _as_it_is(status: Status) -> Status:
    return status


def install(
    backend: str | None = None,
    *,
    frameworks: Sequence[str] | str | None = None,
    initial_pool_size: int | str | None = None,
    maximum_pool_size: int | str | None = None,
    maximum_quarantine_size: int | float | str | None = None,
    wait_timeout: float | None = None,
    release_threshold: int | float | str | None = None,
    retain: str | None = None,
    populate: bool | None = None,
    devices: Sequence[int] | int | str | None = None,
    pool: str | None = None,
    ordering: str | None = None,
    capture: str | None = None,
    on_oom: Callable[[int, int], object] | None = None,
    numpy_scope: str | None = None,
    numpy_min_bytes: int | str | None = None,
    track: str | None = None,
    libraries: Sequence[str] | str | None = None,
    hints: Hints | str | None = None,
    hugepages: str | None = None,
    fork: str | None = None,
    fork_limit: int | str | None = None,
) -> Bridge:
    """Put one pool behind the frameworks.

    Every argument but `on_oom` may also be given as ``RMM_BRIDGE_<NAME>`` in the environment; the argument wins.

    Parameters
    ----------
    backend : {"auto", "managed", "system", "host"}
        ``"managed"`` wraps the current RMM resource if it gives managed memory (a pool over managed included), and
        builds the stack itself if `initial_pool_size` is given. ``"system"`` is memory from the C library on devices
        that can use it. ``"host"`` needs no GPU. ``"auto"`` takes ``"managed"`` where there is a device and ``"host"``
        where there is none; `status` says why.
    frameworks : sequence of str, optional
        Of ``"numpy"``, ``"cupy"``, ``"warp"``, ``"torch"``: those, or an error. By default NumPy and those already
        imported, as far as they can be hooked, but never PyTorch: its allocator can only be set before its first use,
        and for good. Call `install` again with a framework to add it later. Naming NumPy also puts it on managed
        memory where a device cannot share that with the CPU while it is busy; unasked, it stays on host memory there.
    initial_pool_size, maximum_pool_size : int or str, optional
        For each device, in bytes or as text such as ``"2GiB"``: what is kept whatever the program used lately, and the
        most that is taken. Given the first, the bridge builds the pool itself, on a ``ManagedMemoryResource``; that
        takes nothing of the card before it is used. There is no default that depends on the size of the card.
    maximum_quarantine_size : int, float or str, optional
        How much freed memory may wait for device work before an allocation waits (up to a second) for that work rather
        than take more memory: bytes, text, or a fraction of the device's memory; a quarter of `maximum_pool_size` or
        of the device by default. Where the work has not ended by then, a `BridgeWarning` says so.
    wait_timeout : float
        Seconds, 60 by default. An allocation for which there is no memory but what device work still holds waits for
        that work, as long as some of it ends this often. If none does, it fails with a `MemoryError` that names the
        stream and the block.
    release_threshold : int, float or str, optional
        What is cached beyond this, bytes, text or a fraction of the device's memory, is given back by a thread of the
        bridge's own, at most a second later. Takes the place of `retain`.
    retain : {"budget", "all"}
        How much memory the pools keep: ``"budget"``, about twice what the program had alive lately (5 to 10 seconds, 15
        to 30 on devices) and 64 MiB, and never less than `initial_pool_size`; the rest is given back when a pool would
        grow, and by a thread of the bridge's own, on devices once no work is known of that runs. ``"all"``: what was
        taken once, but for `trim` and under pressure.
    populate : bool
        Whether managed memory that no block has had before is prefetched to the device when a block of 1 MiB or more of
        a GPU framework is the first to have it: the device then takes no page faults for it, which cost twenty times
        as much. True by default. Never more than leaves a tenth of the card free, not for NumPy's blocks, and not where
        `hints` or an RMM ``PrefetchResourceAdaptor`` below decide. ``stats().populated_bytes`` says how much it was.
    devices : sequence of int, int or "all", optional
        Devices that get a pool; the current one by default.
    pool : {"on", "debug"}
        ``"debug"``: each block is a piece of upstream of its own between guard bytes, nothing is used
        again, and what is written out of bounds or after a free is reported as a `BridgeWarning`. Slow.
    ordering : {"cautious", "recorded"}
        Which streams' work a block waits for that the CPU used or a view showed: ``"cautious"``, all those that the
        bridge holds, since programs forget to tell; ``"recorded"``, those that are known to have touched it.
    capture : {"refuse"}
        An allocation on a stream that is being captured is an error, and the capture stays valid.
    on_oom : callable, optional
        ``on_oom(size_bytes, attempt)``, called with the GIL held when a request cannot be served; if it returns true,
        having made room, the request is tried once more, and so on. `attempt` counts from 1. It may allocate, and what
        it then cannot get is an ordinary error. An exception from it becomes a note on the `MemoryError`. It is not
        called for allocations of native code without the GIL, such as PyTorch's. Belongs to the process.
    numpy_scope : {"process", "context"}
        ``"process"``: NumPy arrays of every thread, executor, asyncio task and `contextvars` context, but for contexts
        in which somebody set a handler of their own. ``"context"``: those of this context, as NumPy's own rule has
        it: tasks inherit it, other threads allocate as before.
    numpy_min_bytes : int or str
        Smaller NumPy arrays come from where they came from before: NumPy's own functions, and in ``"context"`` scope
        the C library.
    track : {"sites", "counters", "off"}
        What is recorded for each allocation: everything; all but the call site; nothing.
    libraries : sequence of str, optional
        What is no code of the program's own, beside all that is installed (below a folder ``site-packages`` or
        ``dist-packages``) and the standard library: names of modules, or paths. With ``"-"`` before it, what is the
        program's all the same. Call sites are the program's lines; docs/guide/provenance.md says more.
    hints : Hints or str
        When to tell the driver, by itself, where memory will be used: ``"none"``, ``"device"``, ``"host"``,
        ``"read_mostly"``, with a least size ``"device:16MiB"``. None by default, since each is wrong for some work;
        `using_hints` and `tag` choose for a part of the program, but not for new blocks of RMM and PyTorch, which are
        made without the GIL. docs/guide/hints.md says which is for what.
    hugepages : {"auto", "always", "never"}
        Whether blocks of 4 MiB or more are advised to use huge pages, as NumPy does with its own memory: on host and
        system memory only. ``"auto"`` where the kernel leaves it to the program (its setting is ``madvise``) and
        ``NUMPY_MADVISE_HUGEPAGE`` is not 0. Short for ``hints=Hints(hugepages=...)``; a `ConfigError` where both are
        given and differ.
    fork : {"copy", "warn", "refuse"}
        What a fork does about arrays of the CPU in managed memory, which children do not inherit: ``"copy"`` them for
        the child, ``"warn"`` once, or ``"refuse"`` with a `BridgeError`. Forks that Python makes alone.
    fork_limit : int or str, optional
        With more than this in them nothing is copied, and a `BridgeWarning` says so. By default the least of 4 GiB and
        a quarter of the memory that is free.

    Returns
    -------
    Bridge
        The one that is installed. Calling again with nothing new returns it as it is. It is pickled as the `Status` of
        its process, so that it can be the result of a function that runs elsewhere.

    Raises
    ------
    InstallError, BackendError, FrameworkError, ConfigError
        All are `BridgeError`. Then nothing was changed.

    Warns
    -----
    BridgeWarning
        If a device cannot share managed memory with the CPU while it is busy (no ``concurrentManagedAccess``).

    Examples
    --------
    >>> bridge.uninstall()
    >>> bridge.install("host", maximum_pool_size="2GiB")
    <Bridge: host on host, hooked: numpy>
    >>> bridge.owns(np.ones(1000))
    True
    """
    global _bridge
    config = read_config(
        backend=backend,
        frameworks=frameworks,
        initial_pool_size=initial_pool_size,
        maximum_pool_size=maximum_pool_size,
        maximum_quarantine_size=maximum_quarantine_size,
        wait_timeout=wait_timeout,
        release_threshold=release_threshold,
        retain=retain,
        populate=populate,
        devices=devices,
        pool=pool,
        ordering=ordering,
        capture=capture,
        on_oom=on_oom,
        numpy_scope=numpy_scope,
        numpy_min_bytes=numpy_min_bytes,
        track=track,
        libraries=libraries,
        hints=hints,
        hugepages=hugepages,
        fork=fork,
        fork_limit=fork_limit,
    )
    if native_process.phase() == "exiting":
        raise BackendError("install() while the interpreter is shutting down; call it before")
    if native_process.phase() == "forked":
        native_process.begin_again()
    with _lock:
        if _bridge is not None:
            _require_same(_bridge, config)
            _bridge._hooks.hook(config.frameworks or (), required=True)
            _bridge._publish()
            return _bridge
        set_file_rules(config.libraries)
        bridge = Bridge(config)
        try:
            if config.frameworks is None:
                bridge._hooks.hook_imported()
            else:
                bridge._hooks.hook(config.frameworks, required=True)
            bridge._pools.attach()
            reinitialize.watch(_around_reinitialize)
            forks.watch(config.fork, config.fork_limit)
            serve(bridge._pools.by_device)
            record_if_asked()
        except BaseException:
            bridge._hooks.unhook()
            bridge._pools.detach()
            raise
        _bridge = bridge
        pressure.on_oom = config.on_oom
        policy.set_installed(config.hints)
        bridge._publish()
        if (notice := bridge._pools.notice(numpy_asked=bridge._hooks.numpy_asked)) is not None:
            warn_user(notice)
        if backend == "host":
            _warn_of_contradiction(config)
        _log.info("rmm_managed_bridge uses the %s backend: %s", bridge.backend, bridge.reason)
        return bridge


install.__signature__ = signature_with_defaults(install)  # type: ignore[attr-defined]


def enter_block(backend: str | None, **arguments: Any) -> tuple[Bridge, Callable[[], None]]:
    """Install for a ``with`` block, or share what is installed. Returns the bridge, and what closes the block."""
    with _lock:
        outer = _bridge
        bridge = install(backend, **arguments)
        return bridge, bridge._enter_block(made_it=outer is None)


def uninstall() -> None:
    """Put back what was there before `install`, for each framework and for RMM.

    Blocks that are alive stay valid and go back to their pool when they are freed. Where somebody set another
    allocator after `install`, that one stays, and a `BridgeWarning` says so. Does nothing if nothing is installed.

    Examples
    --------
    >>> x = np.ones(1000)
    >>> bridge.uninstall()
    >>> bridge.owns(x), bridge.owns(np.ones(1000))
    (True, False)
    """
    with _lock:
        if _bridge is not None:
            _uninstall(_bridge)


def _uninstall(bridge: Bridge) -> None:
    global _bridge
    _bridge = None
    pressure.on_oom = None
    overview.note_installed(overview.NOT_INSTALLED)
    policy.set_installed(Hints.none)
    reinitialize.unwatch()
    complaints = bridge._hooks.unhook() + bridge._pools.detach()
    for complaint in complaints:
        warn_user(f"uninstall: {complaint}")


def _make_pools(config: BridgeConfig) -> Pools:
    backend, reason = config.backend, "asked for"
    if backend == "auto":
        backend, reason = machine.detect_backend(config.devices)
    if backend == "host":
        return HostPools(config, reason)
    return RmmPools(config, backend, reason)


def _notes(backend: str, config: BridgeConfig) -> tuple[str, ...]:
    """What was asked for in good faith and does nothing here: a program for a GPU also runs without one."""
    if backend != "host":
        return ()
    if config.initial_pool_size is None:
        return _pointless_on_host(config)
    size = format_bytes(config.initial_pool_size)
    note = f"initial_pool_size ({size}) has no effect on the host backend: its pool takes memory as it is needed"
    return (note, *_pointless_on_host(config))


def _pointless_on_host(config: BridgeConfig) -> tuple[str, ...]:
    notes = []
    if config.hints.placement != "none":
        notes.append(f"hints ({config.hints.placement}) have no effect on the host backend: memory there never moves")
    if "ordering" in config.given:
        notes.append(
            f"ordering ({config.ordering}) has no effect on the host backend: there is no device work to wait for"
        )
    return tuple(notes)


def _warn_of_contradiction(config: BridgeConfig) -> None:
    """Warn where one call names the host backend and what only a device has. Sizes of pools are no such thing."""
    if pointless := _pointless_on_host(config):
        warn_user(f"{'; '.join(pointless)}; leave it out")


def _require_same(bridge: Bridge, config: BridgeConfig) -> None:
    """A second `install` may add frameworks, and repeat what is so already."""
    different = []
    for name in sorted(config.given - {"frameworks"}):
        asked = getattr(config, name)
        has = bridge.backend if name == "backend" else getattr(bridge.config, name)
        if asked != has and (name, asked) != ("backend", "auto"):
            different.append(f"{name}={_told(asked)} (is {_told(has)})")
    if different:
        raise InstallError(
            f"the bridge is installed with other settings: {', '.join(different)}; call uninstall() first"
        )


def _told(value: object) -> str:
    """Return a setting as it would be typed: those that are large integers are sizes."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1024:
        return repr(format_bytes(value))
    return repr(str(value)) if isinstance(value, Hints) else shown(value)


def _around_reinitialize(change: Callable[[], None], devices: Sequence[int]) -> None:
    with _lock:
        bridge = _bridge
        if bridge is not None:
            bridge._before_reinitialize(devices)
        try:
            change()
        except BaseException:
            if bridge is not None:
                # RMM has forgotten its resources by now, and would go on with memory that nobody tracks.
                bridge._pools.reattach()
            raise
        if bridge is not None:
            bridge._after_reinitialize(devices)
