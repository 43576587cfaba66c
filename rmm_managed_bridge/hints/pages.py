"""Ranges of bytes in whole pages.

The unit is the page of the operating system (`sysconf`): what the driver rounds advice to, and the smallest piece that
it moves. It often moves 64 KiB or 2 MiB around a fault, which changes speed and never contents, so nothing here relies
on it.
"""

import os

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def outwards(low: int, size_bytes: int, page_bytes: int = PAGE_BYTES) -> tuple[int, int]:
    """Return (start, end) of the pages that have any of the bytes."""
    return low // page_bytes * page_bytes, -(-(low + size_bytes) // page_bytes) * page_bytes


def inwards(low: int, size_bytes: int, page_bytes: int = PAGE_BYTES) -> tuple[int, int]:
    """Return (start, end) of the pages that have none but these bytes; an empty range if there is none."""
    start = -(-low // page_bytes) * page_bytes
    return start, max((low + size_bytes) // page_bytes * page_bytes, start)
