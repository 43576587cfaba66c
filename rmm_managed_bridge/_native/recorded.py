"""Whether call sites are recorded: where they are not, a record without one is not of native code."""

from typing import TypeVar

from rmm_managed_bridge.records import Allocation, CallSite, Event, Holder

NOT_RECORDED = CallSite("not recorded", 0, "")
RECORD_IT = "track='off' records nothing; use install(track='counters') or 'sites', the default"

_Record = TypeVar("_Record", Allocation, Holder, Event)

track: str = "sites"
"""What `install` was told last, which stays after `uninstall`: blocks may outlive it. Set by `install` alone."""


def as_recorded(record: _Record, how: str | None = None) -> _Record:
    """Return a record in which "native" is "not recorded" under ``track="counters"`` (`how`, or as installed)."""
    if (track if how is None else how) == "sites" or record.site.file != "native" or record.site.line:
        return record
    return record._replace(site=NOT_RECORDED)
