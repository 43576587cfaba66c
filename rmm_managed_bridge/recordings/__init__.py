"""Recordings of programs: reading their files, whatever became of them. Never imports the native part."""

from rmm_managed_bridge.recordings.content import Content, by_line
from rmm_managed_bridge.recordings.reading import read

__all__ = ["Content", "by_line", "read"]
