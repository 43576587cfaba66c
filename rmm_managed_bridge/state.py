"""What is installed in this process, for those who report it. Written by `install` alone, under its lock."""

from rmm_managed_bridge.records import Status

NOT_INSTALLED = Status(
    installed=False, backend=None, reason="", devices=(), frameworks={}, numpy_scope=None, track="sites"
)

current: Status = NOT_INSTALLED
