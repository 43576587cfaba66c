"""All that is known, as allocations and frees alone, each free of a block that is there: what other tools expect."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rmm_managed_bridge.recordings.content import Content
from rmm_managed_bridge.recordings.layout import ALLOCATE, DEALLOCATE


class Step(NamedTuple):
    """A block that comes or goes. Numbers of names are those of the recording."""

    comes: bool
    time_ns: int
    """Since the recording began."""
    ptr: int
    size_bytes: int
    thread: int
    """Of the block, also when it goes."""
    framework: int
    tag: int
    site: int
    device: int
    stream: int


def steps(content: Content) -> Iterator[Step]:
    """Yield them in order. A resize is a free and an allocation, and in the end is alive what the recording says."""
    moves = content.moves
    times = content.times_ns(moves["order"]).tolist()
    alive: dict[int, Step] = {}
    for block in content.alive_after(0):
        alive[int(block["serial"])] = step = _comes(block, 0, int(block["stream"]))
        yield step
    for move, time_ns in zip(moves, times, strict=True):
        serial = int(move["serial"])
        gone = alive.pop(serial, None)
        if gone is not None:
            yield gone._replace(comes=False, time_ns=time_ns)
        if move["action"] != DEALLOCATE:
            stream = int(move["extra"]) if move["action"] == ALLOCATE else (0 if gone is None else gone.stream)
            alive[serial] = step = _comes(move, time_ns, stream)
            yield step
    # What a program was killed in the midst of.
    last = times[-1] if times else 0
    known = {int(block["serial"]): block for block in content.blocks}
    for serial, step in alive.items():
        if serial not in known or int(known[serial]["bytes"]) != step.size_bytes:
            yield step._replace(comes=False, time_ns=last)
    for serial, block in known.items():
        if serial not in alive or alive[serial].size_bytes != int(block["bytes"]):
            yield _comes(block, last, int(block["stream"]))


def _comes(place: Any, time_ns: int, stream: int) -> Step:
    return Step(
        comes=True,
        time_ns=time_ns,
        ptr=int(place["ptr"]),
        size_bytes=int(place["bytes"]),
        thread=int(place["thread"]),
        framework=int(place["framework"]),
        tag=int(place["tag"]),
        site=int(place["site"]),
        device=int(place["device"]),
        stream=stream,
    )
