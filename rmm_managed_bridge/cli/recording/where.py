"""`rmm-bridge where`: what a recording knows of one address."""

from pathlib import Path

import click
import numpy as np

from rmm_managed_bridge.cli.recording.common import (
    file_argument,
    json_option,
    say_json,
    say_notes,
    say_table,
    short_site,
    site_fact,
)
from rmm_managed_bridge.recordings import read
from rmm_managed_bridge.recordings.layout import ACTIONS, Array
from rmm_managed_bridge.units import format_bytes

__all__ = ["where"]


class _Pointer(click.ParamType):  # type: ignore[type-arg]
    name = "pointer"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> int:
        try:
            number = value if isinstance(value, int) else int(str(value), 0)
        except ValueError:
            number = -1
        if not 0 <= number < 1 << 64:
            self.fail(f"{value!r} is no address; write 0x7f0012345678", parameter, context)
        return number


@click.command()
@file_argument
@click.argument("pointer", type=_Pointer())
@json_option
def where(file: Path, pointer: int, as_json: bool) -> int:
    """Show the blocks that an address lay in: those that are alive, and what happened to others. Code 1 if none."""
    content = read(file)
    events, blocks = content.events[_over(content.events, pointer)], content.blocks[_over(content.blocks, pointer)]
    times = content.times_ns(events["order"])
    found = [
        {
            "what": ACTIONS[int(event["action"])] if event["action"] < len(ACTIONS) else f"action {event['action']}",
            "seconds": int(time) / 1e9,
            "ptr": int(event["ptr"]),
            "bytes": int(event["bytes"]),
            "serial": int(event["serial"]),
            "framework": content.names.framework(int(event["framework"])),
            "tag": content.names.tag(int(event["tag"])),
            "site": site_fact(content.names.site(int(event["site"]))),
            "thread": int(event["thread"]),
        }
        for event, time in zip(events, times, strict=True)
    ]
    alive = content.allocations(blocks)
    if as_json:
        live = [{"ptr": each.ptr, "bytes": each.requested_bytes, "site": site_fact(each.site)} for each in alive]
        say_json({"pointer": pointer, "alive": live, "events": found, "notes": list(content.notes)})
        return 0 if found or live else 1
    for each in alive:
        click.echo(f"alive: {each}, begins at {each.ptr:#x}")
    rows = [
        (f"{time / 1e9:.3f}", str(fact["what"]), format_bytes(int(event["bytes"])), f"{int(event['ptr']):#x}",
         str(fact["framework"]), str(fact["tag"]), short_site(content.names.site(int(event["site"]))))
        for fact, event, time in zip(found, events, times.tolist(), strict=True)
    ]  # fmt: skip
    if rows:
        say_table(f"{pointer:#x}", (">seconds", "what", ">size", "begins at", "framework", "tag", "line"), rows)
    say_notes(content)
    if not rows and not alive:
        click.echo(f"rmm-bridge: {pointer:#x} lies in no block of {file}", err=True)
        return 1
    return 0


def _over(places: Array, pointer: int) -> Array:
    number = np.uint64(pointer)
    known, before = places["ptr"] != 0, places["ptr"] <= number  # a failure has no address
    inside: Array = known & before & (number - places["ptr"] < np.maximum(places["bytes"], np.uint64(1)))
    return inside
