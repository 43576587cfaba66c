"""The counters of all pools, and what is installed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rmm_managed_bridge.records.listing import Groups, Records
from rmm_managed_bridge.records.single import (
    NOTHING_ADVISED,
    Generation,
    GroupKey,
    Holder,
    Hugepages,
    Usage,
    device_name,
    group_value,
    require_key,
)
from rmm_managed_bridge.records.together import renamed
from rmm_managed_bridge.units import format_bytes, format_count


@dataclass(frozen=True)
class Stats:
    """Counters over all pools of this process, read at one moment; exact if no other thread allocates meanwhile.

    Examples
    --------
    >>> x = np.ones(1 << 20)
    >>> stats = bridge.stats()
    >>> stats.current_bytes >= x.nbytes and stats.reserved_bytes >= stats.current_bytes
    True
    >>> stats.by("framework")["numpy"].current_count >= 1
    True
    """

    current_bytes: int
    current_count: int
    peak_bytes: int
    total_bytes: int
    total_count: int
    reserved_bytes: int
    """What the pools hold from their upstreams."""
    cached_bytes: int
    """The part of `reserved_bytes` that no live block uses and that can be handed out."""
    quarantined_bytes: int
    """The part of `reserved_bytes` that was freed while device work on it was not known to be finished."""
    foreign_frees: int
    size_mismatches: int
    failures: int
    track: str
    numpy_scope: str | None
    hugepages: Hugepages = NOTHING_ADVISED
    pools: tuple[Generation, ...] = ()
    frameworks: Mapping[str, str] = field(default_factory=dict)
    """How each framework stands: ``"hooked"``, or the reason why not."""
    damaged_blocks: int = 0
    """With ``pool="debug"``: how often a block was found written out of its bounds or after it was freed."""
    hints_done: Mapping[str, int] = field(default_factory=dict)
    """Hints that the driver took, by action."""
    hints_skipped: Mapping[str, int] = field(default_factory=dict)
    """Hints that were not given, by reason."""
    slab_free_bytes: int = 0
    """The part of `cached_bytes` that lies between small blocks: it goes back once all blocks of its slab are free."""
    pinned_bytes: int = 0
    """The part of `cached_bytes` in pieces of a device's memory that go back as a whole, and in which blocks live."""
    given_back_count: int = 0
    """How often a piece, or a part of one, went back to where it came from."""
    beyond_budget_count: int = 0
    """How often a pool grew beyond its budget, since it had nothing that could go back."""
    populated_count: int = 0
    """How often pages of managed memory that no block had had before were prefetched to their device: see `install`."""
    populated_bytes: int = 0
    """How much that was, in all."""
    fork_count: int = 0
    """How many forks found arrays of the CPU in managed memory and copied them for the child: see `install`."""
    fork_bytes: int = 0
    """What those children were given, in all."""
    fork_copied_bytes: int = 0
    """The part of it that was copied; the rest was as the fork before had left it, and is shared."""
    fork_seconds: float = 0.0
    """How long that took, with the waits for device work."""
    holders: tuple[tuple[Holder, Usage], ...] = field(default=(), repr=False)
    generations = renamed("generations", "pools")

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", Records(self.pools))

    def by(self, key: GroupKey) -> Groups[Usage]:
        """Return counters per framework, tag, site, device or kind, most live bytes first."""
        require_key(key)
        groups: dict[str, list[Usage]] = {}
        for holder, usage in self.holders:
            groups.setdefault(group_value(holder, key), []).append(usage)
        summed = {name: Usage(*map(sum, zip(*usages, strict=True))) for name, usages in groups.items()}
        return Groups(key, dict(sorted(summed.items(), key=lambda item: (-item[1].current_bytes, item[0]))))

    def __repr__(self) -> str:
        return f"<Stats: {self}>"

    def __str__(self) -> str:
        if self.track == "off":
            recorded = "live, peak and total not recorded (track='off')"
        else:
            recorded = (
                f"live {format_bytes(self.current_bytes)} in {self.current_count}, "
                f"peak {format_bytes(self.peak_bytes)}, total {format_bytes(self.total_bytes)} in {self.total_count}"
            )
        return (
            f"{recorded}, reserved {format_bytes(self.reserved_bytes)} (cached {format_bytes(self.cached_bytes)}, "
            f"quarantined {format_bytes(self.quarantined_bytes)})"
        )


@dataclass(frozen=True)
class Status:
    """What is installed now. Printable.

    Examples
    --------
    >>> status = bridge.status()
    >>> status.installed, status.backend, status.frameworks["numpy"]
    (True, 'host', 'hooked')
    """

    installed: bool
    backend: str | None
    reason: str
    """Why this backend."""
    devices: tuple[int, ...]
    frameworks: Mapping[str, str]
    """``"hooked"``, or the reason why not, for each framework that was looked at."""
    numpy_scope: str | None
    track: str
    hugepages: str = "never"
    pools: tuple[Generation, ...] = ()
    hints: str = "none"
    """Which hints are given where neither the context nor a tag says otherwise."""
    notes: tuple[str, ...] = ()
    """What was asked for and has no effect here, and what keeps arrays of this context out of the pool."""
    forked: bool = False
    """This process was forked from one in which the bridge had pools. Nothing of those is counted or freed here."""
    fork: str = "copy"
    """What becomes of arrays of the CPU in managed memory at a fork: see `install`."""
    generations = renamed("generations", "pools")

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", Records(self.pools))

    def __repr__(self) -> str:
        if not self.installed:
            return "<Status: not installed, in a fork>" if self.forked else "<Status: not installed>"
        hooked = ", ".join(name for name, state in self.frameworks.items() if state == "hooked") or "nothing"
        return f"<Status: {self.backend}, hooked: {hooked}, {format_count(len(self.pools), 'pool')}>"

    def __str__(self) -> str:
        if not self.installed and self.forked:
            return (
                "rmm_managed_bridge is not installed in this process, a fork of one that has its pools: new NumPy "
                "arrays are plain memory, the limits of tags are off, and there is no GPU memory; call "
                "rmm_managed_bridge.install('host') here, or start workers with 'spawn' or 'forkserver' for the GPU"
            )
        if not self.installed:
            return "rmm_managed_bridge is not installed in this process; call rmm_managed_bridge.install()"
        lines = [f"backend {self.backend}: {self.reason}"]
        if self.forked:
            lines.append("  a forked process, with pools of its own; what its parent has is not counted")
        lines.extend(f"  {name}: {state}" for name, state in self.frameworks.items())
        scope = self.numpy_scope or "not hooked"
        forks = "" if self.fork == "copy" else f"; forks: {self.fork}"
        lines.append(f"  call sites: {self.track}; NumPy scope: {scope}; hints: {self.hints}{forks}")
        lines.extend(f"  note: {note}" for note in self.notes)
        for each in self.pools:
            where, state = device_name(each.device), "current" if each.current else "retired"
            live = f"{format_bytes(each.current_bytes)} live in {each.current_count}"
            lines.append(
                f"  pool {each.number} on {where}, {state}: {live}, {format_bytes(each.reserved_bytes)} reserved"
            )
        return "\n".join(lines)
