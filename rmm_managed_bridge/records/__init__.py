"""Frozen records: what the ledger says about memory. No record refers to the memory it describes."""

from rmm_managed_bridge.records.listing import Groups, Records
from rmm_managed_bridge.records.single import (
    GROUP_KEYS,
    Allocation,
    CallSite,
    Event,
    Generation,
    GroupKey,
    Holder,
    Hugepages,
    Usage,
    device_name,
    group_value,
)
from rmm_managed_bridge.records.state import Stats, Status
from rmm_managed_bridge.records.together import History, Peak, Snapshot, SnapshotDifference

__all__ = [
    "GROUP_KEYS",
    "Allocation",
    "CallSite",
    "Event",
    "Generation",
    "GroupKey",
    "Groups",
    "History",
    "Holder",
    "Hugepages",
    "Peak",
    "Records",
    "Snapshot",
    "SnapshotDifference",
    "Stats",
    "Status",
    "Usage",
    "device_name",
    "group_value",
]
