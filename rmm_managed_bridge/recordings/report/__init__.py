"""A recording as one page of HTML that needs nothing else."""

from rmm_managed_bridge.recordings.report.page import report_page

__all__ = ["report_page"]
