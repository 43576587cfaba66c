"""The arguments of `install`, checked: arguments before the environment before the defaults."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal

from rmm_managed_bridge._native import pressure
from rmm_managed_bridge.config.environment import PREFIX, unknown_in
from rmm_managed_bridge.errors import ConfigError, FrameworkError, shown, warn_renamed, warn_user
from rmm_managed_bridge.frameworks.registry import HOOKED
from rmm_managed_bridge.units import format_bytes, parse_bytes, parse_bytes_or_fraction

Backend = Literal["auto", "managed", "system", "host"]
Track = Literal["sites", "counters", "off"]
NumpyScope = Literal["process", "context"]

BACKENDS = ("auto", "managed", "system", "host")
TRACKS = ("sites", "counters", "off")
NUMPY_SCOPES = ("process", "context")
POOLS = ("on", "debug")
_NONE_OLD: Mapping[str, str] = MappingProxyType({})
RETAINS = ("budget", "all")
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_LEAST_POOL_BYTES = 256 << 10  # with less, no slab of the smallest blocks has room
_LONGEST_WAIT_S = 1_000_000
ORDERINGS = ("cautious", "recorded")
CAPTURES = ("refuse",)
HUGEPAGES = ("auto", "always", "never")
FORKS = ("copy", "warn", "refuse")


PLACEMENTS = ("none", "device", "host", "read_mostly")


@dataclass(frozen=True, init=False)
class Hints:
    """When the bridge tells the driver, by itself, where managed memory will be used. docs/guide/hints.md has numbers.

    The presets are `Hints.none`, `Hints.device`, `Hints.host` and `Hints.read_mostly`, with the usual least size. Where
    hints are taken, a name such as ``"device"`` or ``"device:16MiB"`` will do as well.

    Parameters
    ----------
    placement : {"none", "device", "host", "read_mostly"}
        ``"device"``: for work that comes back to the same data on the device. An array that is handed to the device
        (`as_cupy`, `as_warp`) is prefetched to it on the stream that will use it, new blocks of CuPy and Warp are
        too, and `as_numpy` prefetches to host memory. So are new blocks that RMM (a `DeviceBuffer`, C++ code) and
        PyTorch make on a stream, where `install` was told: these are made without the GIL, and no tag or context is
        seen there.
        ``"host"``: for one pass over data of the CPU. The array stays where it is, and the device reads and writes it
        over the bus.
        ``"read_mostly"``: for tables that both sides read. Each gets a copy; a write ends the other copies.
    min_bytes : int or str
        Smaller arrays are left alone: below 1 MiB a hint costs about what it saves.
    hugepages : {"auto", "always", "never"}, optional
        The same as ``install(hugepages=...)``, and for `install` only: it is about whole pools. None leaves it to that
        argument.

    Raises
    ------
    ConfigError
        If one of them is not what it may be.

    Examples
    --------
    >>> print(bridge.Hints("device", min_bytes="16MiB"))
    device from 16.0 MiB
    >>> bridge.Hints.host.placement
    'host'
    """

    placement: str
    min_bytes: int
    hugepages: str | None

    none: ClassVar["Hints"]
    device: ClassVar["Hints"]
    host: ClassVar["Hints"]
    read_mostly: ClassVar["Hints"]

    def __init__(
        self, placement: str = "none", min_bytes: int | str = 1 << 20, *, hugepages: str | None = None
    ) -> None:
        if not isinstance(placement, str) or placement not in PLACEMENTS:
            raise ConfigError(f"placement={shown(placement)} is not one of {', '.join(map(repr, PLACEMENTS))}")
        if hugepages is not None and (not isinstance(hugepages, str) or hugepages not in HUGEPAGES):
            raise ConfigError(f"hugepages={shown(hugepages)} is not one of {', '.join(map(repr, HUGEPAGES))}")
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "min_bytes", parse_bytes(min_bytes, "min_bytes"))
        object.__setattr__(self, "hugepages", hugepages)

    def __str__(self) -> str:
        text = self.placement if self.placement == "none" else f"{self.placement} from {format_bytes(self.min_bytes)}"
        return text if self.hugepages is None else f"{text}, hugepages {self.hugepages}"

    @classmethod
    def read(cls, value: object, name: str = "hints") -> "Hints":
        """Return `value` as hints: itself, or what a text such as ``"device"`` or ``"device:16MiB"`` means."""
        if isinstance(value, Hints):
            return value
        if not isinstance(value, str):
            words = ", ".join(PLACEMENTS)
            raise ConfigError(f"{name}={shown(value)} is not hints; write one of {words}, or Hints(...)")
        placement, colon, size = value.partition(":")
        if placement not in PLACEMENTS:
            raise ConfigError(f"{name}={shown(value)} is not one of {', '.join(map(repr, PLACEMENTS))}")
        return cls(placement, parse_bytes(size, f"{name}={shown(value)}")) if colon else cls(placement)


Hints.none = Hints("none")
Hints.device = Hints("device")
Hints.host = Hints("host")
Hints.read_mostly = Hints("read_mostly")


@dataclass(frozen=True)
class PoolSettings:
    """What a pool is told when it is made. Sizes are bytes; None bounds nothing beyond what the pool itself does."""

    limit_bytes: int | None = None
    """Of what is reserved from upstream. By default its devices' memory and what the process may have of the machine's;
    of host memory what the kernel gives."""
    release_threshold_bytes: int | None = None
    """More than this is not kept cached."""
    quarantine_limit_bytes: int | None = None
    """With more than this waiting for device work, an allocation waits for a while before it takes more memory."""
    patience_ms: int = 1000
    """How long that is."""
    wait_timeout_ms: int = 60_000
    """How long an allocation waits for freed blocks while none of the work that they wait for ends."""
    ordering: str = "cautious"
    pool: str = "on"
    retain: str = "budget"
    least_budget_bytes: int = 0
    """So much may be reserved whatever the program used lately."""
    spare_bytes: int = 64 << 20
    """What may be reserved beyond twice that."""
    populate: bool = True
    """Whether managed pages that a device's block is the first to have are prefetched to it."""
    recent_ms: int | None = None
    """How long "lately" is at least; by default 5 s, and 15 s on devices."""


@dataclass(frozen=True)
class BridgeConfig:
    """What `install` was asked for. Sizes are bytes."""

    backend: str = "auto"
    frameworks: tuple[str, ...] | None = None
    initial_pool_size: int | None = None
    maximum_pool_size: int | None = None
    maximum_quarantine_size: int | float | None = None
    wait_timeout: float = 60.0
    """Seconds."""
    release_threshold: int | float | None = None
    """Bytes, or (a float) a fraction of the device's memory; so is `maximum_quarantine_size`."""
    retain: str = "budget"
    populate: bool = True
    pool: str = "on"
    ordering: str = "cautious"
    capture: str = "refuse"
    on_oom: Callable[[int, int], object] | None = None
    devices: tuple[int, ...] | Literal["all"] | None = None
    numpy_scope: str = "process"
    numpy_min_bytes: int = 0
    track: str = "sites"
    libraries: tuple[str, ...] = ()
    """Modules and paths; those that begin with "-" are the program's own."""
    hints: Hints = Hints.none
    """Where memory is wanted. Their `hugepages` is None here: it is in the next field, whoever said it."""
    hugepages: str = "auto"
    fork: str = "copy"
    fork_limit: int | None = None
    given: frozenset[str] = frozenset()
    """Which of these were stated, as an argument or in the environment."""

    def settings_for(self, memory_bytes: int) -> PoolSettings:
        """Return the settings of a pool on a device (or host) that has this much memory."""

        def size(value: int | float | None) -> int | None:
            return int(value * memory_bytes) if isinstance(value, float) else value

        # A quarter: enough for any pipeline that goes on, and a hanging kernel then leaves the rest to work with.
        quarantine = self.maximum_quarantine_size
        if quarantine is None:
            quarantine = (self.maximum_pool_size or memory_bytes) // 4
        return PoolSettings(
            limit_bytes=self.maximum_pool_size,
            release_threshold_bytes=size(self.release_threshold),
            quarantine_limit_bytes=size(quarantine),
            wait_timeout_ms=int(self.wait_timeout * 1000),
            ordering=self.ordering,
            pool=self.pool,
            retain=self.retain,
            populate=self.populate,
            least_budget_bytes=self.initial_pool_size or 0,
        )


def read_config(
    *,
    backend: str | None = None,
    frameworks: Sequence[str] | str | None = None,
    initial_pool_size: int | str | None = None,
    maximum_pool_size: int | str | None = None,
    maximum_quarantine_size: int | float | str | None = None,
    wait_timeout: float | str | None = None,
    release_threshold: int | float | str | None = None,
    retain: str | None = None,
    populate: bool | str | None = None,
    pool: str | None = None,
    ordering: str | None = None,
    capture: str | None = None,
    on_oom: Callable[[int, int], object] | None = None,
    devices: Sequence[int] | int | str | None = None,
    numpy_scope: str | None = None,
    numpy_min_bytes: int | str | None = None,
    track: str | None = None,
    libraries: Sequence[str] | str | None = None,
    hints: Hints | str | None = None,
    hugepages: str | None = None,
    fork: str | None = None,
    fork_limit: int | str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> BridgeConfig:
    """Return the configuration from arguments and, for those that are None, ``RMM_BRIDGE_<NAME>``.

    Raises
    ------
    ConfigError
        If a value cannot be used; the message names the argument or variable and what it may be.
    FrameworkError
        If a framework's name is not known.

    Warns
    -----
    BridgeWarning
        Of variables that begin as the bridge's do and stand for no argument.
    """
    stated: set[str] = set()
    sources: dict[str, str] = {}

    def given(name: str, value: object) -> tuple[object, str]:
        variable = PREFIX + name.upper()
        sources[name] = name
        if value is None and environment.get(variable, "") != "":
            stated.add(name)
            sources[name] = variable
            return environment[variable], variable
        if value is not None:
            stated.add(name)
        return value, name

    def choice(
        name: str, value: object, choices: Sequence[str], default: str, old: Mapping[str, str] = _NONE_OLD
    ) -> str:
        found, source = given(name, value)
        if isinstance(found, str) and found in old:
            warn_renamed(f'{source}="{found}"', f'{source}="{old[found]}"')
            found = old[found]
        if found is None:
            return default
        if not isinstance(found, str) or found not in choices:
            cure = _if_a_size(found) if name == "backend" else ""
            raise ConfigError(f"{source}={shown(found)} is not one of {', '.join(map(repr, choices))}{cure}")
        return found

    def switch(name: str, value: object, default: bool) -> bool:
        found, source = given(name, value)
        if found is None:
            return default
        if isinstance(found, str) and found.lower() in _SWITCHES:
            return _SWITCHES[found.lower()]
        if not isinstance(found, bool):
            raise ConfigError(f"{source}={shown(found)} is neither True nor False")
        return found

    def seconds(name: str, value: object, default: float) -> float:
        found, source = given(name, value)
        if found is None:
            return default
        try:
            number = -1.0 if isinstance(found, bool) else float(found)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = -1.0
        if not 0 <= number <= _LONGEST_WAIT_S:
            raise ConfigError(
                f"{source}={shown(found)} is not a time to wait; write seconds, such as 60 or 0.5, up to "
                f"{_LONGEST_WAIT_S:,}"
            )
        return number

    def size(name: str, value: object, least: int = 0) -> int | None:
        found, source = given(name, value)
        size_bytes = None if found is None else parse_bytes(found, source)  # type: ignore[arg-type]
        if size_bytes is not None and size_bytes < least:
            raise ConfigError(
                f"{source}={shown(found)} is less than a pool can work with; write {format_bytes(least)} or more, or "
                "leave it out for no limit of its own"
            )
        return size_bytes

    def size_or_fraction(name: str, value: object) -> int | float | None:
        found, source = given(name, value)
        return None if found is None else parse_bytes_or_fraction(found, source)

    wanted = _read_hints(*given("hints", hints))
    if wanted.hugepages is not None:  # in an argument, since text has no word for it: before the environment
        if hugepages not in (None, wanted.hugepages):
            raise ConfigError(f"hugepages={shown(hugepages)}, but hints={wanted!r} has another; say it in one of them")
        hugepages = wanted.hugepages

    if on_oom is not None:
        pressure.require_callback(on_oom)

    config = BridgeConfig(
        backend=choice("backend", backend, BACKENDS, "auto"),
        frameworks=_read_frameworks(*given("frameworks", frameworks)),
        initial_pool_size=size("initial_pool_size", initial_pool_size),
        maximum_pool_size=size("maximum_pool_size", maximum_pool_size, _LEAST_POOL_BYTES),
        maximum_quarantine_size=size_or_fraction("maximum_quarantine_size", maximum_quarantine_size),
        wait_timeout=seconds("wait_timeout", wait_timeout, 60.0),
        release_threshold=size_or_fraction("release_threshold", release_threshold),
        retain=choice("retain", retain, RETAINS, "budget"),
        populate=switch("populate", populate, True),
        pool=choice("pool", pool, POOLS, "on", {"off": "debug"}),
        ordering=choice("ordering", ordering, ORDERINGS, "cautious"),
        capture=choice("capture", capture, CAPTURES, "refuse"),
        on_oom=on_oom,
        devices=_read_devices(*given("devices", devices)),
        numpy_scope=choice("numpy_scope", numpy_scope, NUMPY_SCOPES, "process"),
        numpy_min_bytes=size("numpy_min_bytes", numpy_min_bytes) or 0,
        track=choice("track", track, TRACKS, "sites"),
        libraries=_read_libraries(*given("libraries", libraries)),
        hints=replace(wanted, hugepages=None),
        hugepages=choice("hugepages", hugepages, HUGEPAGES, "auto"),
        fork=choice("fork", fork, FORKS, "copy"),
        fork_limit=size("fork_limit", fork_limit),
        given=frozenset(stated | ({"on_oom"} if on_oom is not None else set())),
    )
    _require_sizes(config, sources)
    if complaints := unknown_in(environment, sources):
        warn_user("; ".join(complaints))
    return config


def _if_a_size(backend: object) -> str:
    try:
        parse_bytes(backend)  # type: ignore[arg-type]  # which says so
    except ConfigError:
        return ""
    return f"; for the size of the pool write install(initial_pool_size={shown(backend)})"


def _require_sizes(config: BridgeConfig, sources: Mapping[str, str]) -> None:
    first, most = config.initial_pool_size, config.maximum_pool_size
    if first is not None and most is not None and first > most:
        first_from, most_from = sources["initial_pool_size"], sources["maximum_pool_size"]
        raise ConfigError(
            f"{first_from} ({format_bytes(first)}) is more than {most_from} ({format_bytes(most)}); make the "
            "first smaller, or the maximum larger"
        )


def _read_hints(value: object, source: str) -> Hints:
    return Hints.none if value is None else Hints.read(value, source)


def _read_frameworks(value: object, source: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, Iterable):
        raise ConfigError(f"{source}={shown(value)} is not a list of frameworks; write {list(HOOKED)} or some of them")
    names = value.replace(",", " ").split() if isinstance(value, str) else list(value)
    for name in names:
        if not isinstance(name, str) or name not in HOOKED:
            known = ", ".join(HOOKED)
            raise FrameworkError(f"{source}: {shown(name)} is not a framework the bridge knows; use {known}")
    return tuple(dict.fromkeys(names))


def _read_libraries(value: object, source: str) -> tuple[str, ...]:
    if value is None:
        return ()
    names = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    names = [name.strip() if isinstance(name, str) else name for name in names]
    for name in names:
        if not isinstance(name, str) or name in ("", "-") or "\0" in name:
            raise ConfigError(
                f"{source}={shown(value)} is not a list of libraries; write names of modules or paths, such as "
                "'mylib,-pandas'"
            )
    return tuple(dict.fromkeys(names))


def _read_devices(value: object, source: str) -> tuple[int, ...] | Literal["all"] | None:
    if value is None or (isinstance(value, str) and value == "all"):
        return "all" if value else None
    try:
        if isinstance(value, str):
            numbers = tuple(int(part) for part in value.replace(",", " ").split())
        elif isinstance(value, int):
            numbers = (value,)
        elif isinstance(value, Iterable):
            numbers = tuple(int(part) for part in value)
        else:
            numbers = ()
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or min(numbers) < 0:
        raise ConfigError(f"{source}={shown(value)} is not a list of device numbers; write [0], [0, 1] or 'all'")
    return tuple(dict.fromkeys(numbers))
