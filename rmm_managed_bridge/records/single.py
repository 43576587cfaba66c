"""Records of one thing: a block, a holder, a pool, an event. Each can be a row of a table."""

import re
import sys
from typing import Literal, NamedTuple

from rmm_managed_bridge.errors import ConfigError, shown
from rmm_managed_bridge.units import format_bytes

GroupKey = Literal["framework", "tag", "site", "device", "kind"]
GROUP_KEYS: tuple[GroupKey, ...] = ("framework", "tag", "site", "device", "kind")


_CELL = re.compile(r"^<ipython-input-|/ipykernel_\d+/")


class CallSite(NamedTuple):
    """The program's own line, and the library's that it went through; file ``"native"`` where there is no Python frame.

    Examples
    --------
    >>> x = np.ones(1000)
    >>> site = bridge.allocation_of(x).site
    >>> site.line, site.via.function
    (1, 'ones')
    """

    file: str
    line: int
    function: str
    via: "CallSite | None" = None
    """The innermost line of a library between this one and the allocation, if there is one."""
    library: bool = False
    """True where the thread ran no code of the program's own: then this is the innermost line of a library."""

    @property
    def place(self) -> str:
        """``file:line``, by which sites are told apart where they are summed; of a notebook's cell, ``In [3]:line``."""
        return self.file if self.line == 0 else f"{_cell(self.file) or self.file}:{self.line}"

    def __str__(self) -> str:
        if self.library:
            return f"{self.place} (library)"
        return self.place if self.via is None else f"{self.place} ({self.function}) via {_in_package(self.via.place)}"


def _cell(file: str) -> str | None:
    """Return what IPython shows a cell as, in the process that ran it: nobody has seen the file that it is named as."""
    if not _CELL.search(file) or (ipython := sys.modules.get("IPython")) is None:
        return None
    compiler = getattr(ipython.get_ipython(), "compile", None)
    ask = getattr(compiler, "format_code_name", None)
    label = None if ask is None else ask(file)  # ("Cell", "In[3]")
    return None if label is None else label[1].replace("In[", "In [")


def _in_package(place: str) -> str:
    """Return a library's place without the folder that it is installed in."""
    return re.split(r"(?:^|/)(?:site|dist)-packages/", place)[-1]


class Allocation(NamedTuple):
    """One live block, as it was when the record was read.

    Examples
    --------
    >>> with bridge.tag("load"):
    ...     x = np.ones(1 << 20)
    >>> record = bridge.allocation_of(x)
    >>> record.requested_bytes, record.framework, record.tag, record.kind
    (8388608, 'numpy', 'load', 'host')
    """

    ptr: int
    requested_bytes: int
    framework: str
    site: CallSite
    tag: str
    device: int
    """CUDA device number; -1 for host memory."""
    stream: int
    """Handle of the stream that the block was allocated on; 0 for host order and for the default stream."""
    thread: int
    """Native thread id, as :func:`threading.get_native_id` gives it."""
    time_ns: int
    """Nanoseconds since the epoch, from a coarse clock (about 4 ms)."""
    kind: str
    """``"managed"``, ``"system"``, ``"host"``, or ``"device"`` for an upstream that the bridge cannot place."""
    serial: int
    """Tells allocations of this process apart. Rises with time within a thread; threads take numbers in blocks."""
    resized_count: int

    def __str__(self) -> str:
        return f"{format_bytes(self.requested_bytes)}, {_whose(self)}, {self.kind}"

    def row(self) -> dict[str, str]:
        """Return the cells of this record in a table."""
        return {"size": format_bytes(self.requested_bytes), **_provenance(self), "kind": self.kind}


class Holder(NamedTuple):
    """What one (framework, tag, site, device, kind) held."""

    framework: str
    tag: str
    site: CallSite
    device: int
    kind: str
    current_bytes: int
    current_count: int

    def __str__(self) -> str:
        return f"{format_bytes(self.current_bytes)} in {self.current_count}, {_whose(self)}, {self.kind}"

    def row(self) -> dict[str, str]:
        """Return the cells of this record in a table."""
        size = {"size": format_bytes(self.current_bytes), "count": str(self.current_count)}
        return {**size, **_provenance(self), "kind": self.kind}


class Usage(NamedTuple):
    """Counters of one holder, or of the sum over several."""

    current_bytes: int
    current_count: int
    peak_bytes: int
    """Highest `current_bytes` of this holder over all threads; for a sum of holders, an upper bound of the true peak.

    Exact for one thread, and for blocks of 1 MiB and more; with several threads off by up to 256 KiB."""
    total_bytes: int
    total_count: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.current_bytes)} live in {self.current_count}, "
            f"own peak {format_bytes(self.peak_bytes)}, total {format_bytes(self.total_bytes)} in {self.total_count}"
        )

    def row(self) -> dict[str, str]:
        """Return the cells of this record in a table."""
        return {
            "live": format_bytes(self.current_bytes),
            "count": str(self.current_count),
            "own peak": format_bytes(self.peak_bytes),
            "total": format_bytes(self.total_bytes),
            "total count": str(self.total_count),
        }


class Generation(NamedTuple):
    """One pool that was attached to one device, current or retired."""

    number: int
    device: int
    kind: str
    current: bool
    current_bytes: int
    current_count: int
    reserved_bytes: int

    def row(self) -> dict[str, str]:
        """Return the cells of this record in a table."""
        return {
            "pool": str(self.number),
            "device": device_name(self.device),
            "kind": self.kind,
            "state": "current" if self.current else "retired",
            "live": format_bytes(self.current_bytes),
            "count": str(self.current_count),
            "reserved": format_bytes(self.reserved_bytes),
        }


class Hugepages(NamedTuple):
    """What was advised about huge pages."""

    mode: str
    """What `install` was told, by its `hugepages` or its `hints`; ``"never"`` while nothing is installed."""
    advised_bytes: int
    """How much memory of the pools carries the advice now, live blocks and free ones together."""
    call_count: int
    """Calls of ``madvise`` so far, also those that ended advice."""
    failure_count: int
    """Those of them that failed. Nothing follows from a failure but that the advice is not there."""


NOTHING_ADVISED = Hugepages("never", 0, 0, 0)


def require_key(key: object) -> None:
    """Refuse what records are not grouped by, also where there is none to group."""
    if not isinstance(key, str) or key not in GROUP_KEYS:
        raise ConfigError(f"cannot group by {shown(key)}; use one of {', '.join(GROUP_KEYS)}")


def group_value(record: Allocation | Holder, key: GroupKey) -> str:
    """Return what `record` is grouped under for `key`, as text."""
    require_key(key)
    if key == "device":
        return device_name(record.device)
    return record.site.place if key == "site" else str(getattr(record, key))


class Event(NamedTuple):
    """One thing that happened to memory, from the bounded history."""

    action: str
    """``"allocate"``, ``"deallocate"``, ``"resize"``, ``"failure"``, ``"foreign_free"``, ``"size_mismatch"`` or
    ``"damage"``."""
    ptr: int
    requested_bytes: int
    stated_bytes: int
    """What the caller of a free said the size was; 0 where it said nothing."""
    framework: str
    tag: str
    site: CallSite
    device: int
    stream: int
    thread: int
    time_ns: int
    serial: int

    def __str__(self) -> str:
        stated = f" (freed as {self.stated_bytes} bytes)" if self.stated_bytes not in (0, self.requested_bytes) else ""
        where = f" at {self.ptr:#x}" if self.ptr else ""
        return f"{self.action} of {format_bytes(self.requested_bytes)}{stated}{where}, {_whose(self)}"

    def row(self) -> dict[str, str]:
        """Return the cells of this record in a table."""
        size = format_bytes(self.requested_bytes)
        if self.stated_bytes not in (0, self.requested_bytes):
            size += f" (freed as {self.stated_bytes} bytes)"
        return {"what": self.action, "size": size, "address": f"{self.ptr:#x}" if self.ptr else "", **_provenance(self)}


def device_name(device: int) -> str:
    """Return ``"cuda:0"`` and the like, or ``"host"`` for -1."""
    return "host" if device < 0 else f"cuda:{device}"


def _whose(record: Allocation | Holder | Event) -> str:
    tag = f', tag "{record.tag}"' if record.tag else ""
    return f"{record.framework}{tag}, {_site(record)}, {device_name(record.device)}"


def _site(record: Allocation | Holder | Event) -> str:
    """Return the site as text, without a line of the very framework that is named beside it: of `np.full` no news."""
    site = record.site
    by_itself = site.via is not None and _in_package(site.via.file).startswith(f"{record.framework}/")
    return site.place if by_itself else str(site)


def _provenance(record: Allocation | Holder | Event) -> dict[str, str]:
    return {
        "framework": record.framework,
        "tag": record.tag,
        "site": _site(record),
        "device": device_name(record.device),
    }
