import re
from typing import Any

import pytest

from rmm_managed_bridge.records import Allocation, CallSite, Generation, Holder, Peak, Snapshot, Stats, Status, Usage
from rmm_managed_bridge.reports.tables import peak_table, provenance_table, stats_table, status_table, to_text

MIB = 1 << 20


def allocation(serial: int, size_bytes: int, framework: str = "numpy", tag: str = "load") -> Allocation:
    site = CallSite("/srv/projects/simulation/solver/with/many/folders/main.py", serial, "run")
    return Allocation(
        ptr=serial << 20,
        requested_bytes=size_bytes,
        framework=framework,
        site=site,
        tag=tag,
        device=0,
        stream=0,
        thread=1,
        time_ns=0,
        kind="managed",
        serial=serial,
        resized_count=0,
    )


def snapshot(*allocations: Allocation) -> Snapshot:
    current_bytes = sum(a.requested_bytes for a in allocations)
    return Snapshot(allocations=allocations, current_bytes=current_bytes, peak=Peak(current_bytes, ()))


def holder(framework: str, size_bytes: int, *, device: int = 0, tag: str = "step") -> Holder:
    return Holder(framework, tag, CallSite("sim.py", 9, "run"), device, "managed", size_bytes, 2)


def stats(**changes: int) -> Stats:
    counters: dict[str, Any] = {
        "current_bytes": 3 * MIB,
        "current_count": 4,
        "peak_bytes": 8 * MIB,
        "total_bytes": 16 * MIB,
        "total_count": 17,
        "reserved_bytes": 64 * MIB,
        "cached_bytes": 32 * MIB,
        "quarantined_bytes": 0,
        "foreign_frees": 0,
        "size_mismatches": 0,
        "failures": 0,
    }
    usage = Usage(3 * MIB, 4, 8 * MIB, 16 * MIB, 17)
    held = ((holder("cupy", 3 * MIB), usage),)
    return Stats(**{**counters, **changes}, track="sites", numpy_scope="process", holders=held)


def line_with(text: str, *words: str) -> str:
    lines = [line for line in text.splitlines() if all(re.search(rf"(?<!\S){re.escape(w)}(?!\S)", line) for w in words)]
    assert len(lines) == 1, f"{words} in {len(lines)} lines of\n{text}"
    return lines[0]


def test_provenance_lists_the_largest_first_with_all_it_knows() -> None:
    text = to_text(provenance_table(snapshot(allocation(1, MIB), allocation(2, 16 * MIB, "cupy", "step"))), 120)
    line = line_with(text, "16.0", "MiB", "cupy", "step", "cuda:0", "managed")
    assert "main.py:2" in line
    assert text.index("main.py:2") < text.index("main.py:1")


def test_provenance_totals_each_framework() -> None:
    blocks = (allocation(1, MIB), allocation(2, 2 * MIB), allocation(3, 4 * MIB, "warp"))
    text = to_text(provenance_table(snapshot(*blocks)), 120)
    assert "3.00 MiB" in line_with(text, "numpy", "total", "2", "allocations")
    assert "4.00 MiB" in line_with(text, "warp", "total", "1", "allocation")
    assert "7.00 MiB live in 3 allocations" in text


def test_provenance_sums_up_what_it_does_not_list() -> None:
    text = to_text(provenance_table(snapshot(*(allocation(n, MIB) for n in range(1, 6))), limit=2), 120)
    assert "3.00 MiB" in line_with(text, "and", "3", "smaller")


def test_long_path_loses_its_beginning_and_not_its_line() -> None:
    text = to_text(provenance_table(snapshot(allocation(123, MIB)), site_width=22), 120)
    assert "…/folders/main.py:123" in text
    assert "many" not in text


@pytest.mark.parametrize("width", [72, 80, 100])
def test_narrow_terminal_takes_room_from_the_path_only(width: int) -> None:
    text = to_text(provenance_table(snapshot(allocation(123, 123 * MIB, "framework"))), width)
    line = line_with(text, "123", "MiB", "framework", "load", "cuda:0", "managed")
    assert "main.py:123" in line
    assert len(line) <= width


def test_narrow_terminal_takes_room_from_the_path_of_a_holder_only() -> None:
    site = CallSite("/srv/projects/simulation/solver/with/many/folders/main.py", 123, "run")
    peak = Peak(MIB, (holder("framework", MIB)._replace(site=site),))
    line = line_with(to_text(peak_table(peak), 80), "1.00", "MiB", "100", "2", "framework", "step", "cuda:0", "managed")
    assert ".py:123" in line


def test_tag_that_looks_like_markup_is_printed_as_it_is() -> None:
    text = to_text(provenance_table(snapshot(allocation(1, MIB, tag="[red]hot[/red]"))), 120)
    assert "[red]hot[/red]" in text


def test_empty_snapshot_has_a_table() -> None:
    assert "0 B live in 0 allocations" in to_text(provenance_table(snapshot()), 120)


def test_peak_names_the_largest_holders_with_their_share() -> None:
    peak = Peak(10 * MIB, (holder("numpy", MIB), holder("warp", 6 * MIB), holder("cupy", 3 * MIB)))
    text = to_text(peak_table(peak, 2), 120)
    assert "6.00 MiB" in line_with(text, "warp", "60", "%")
    assert "3.00 MiB" in line_with(text, "cupy", "30", "%")
    assert "1.00 MiB" in line_with(text, "and", "1", "holder", "more")
    assert "10.0 MiB live at the peak" in text


def test_peak_says_host_for_host_memory() -> None:
    assert line_with(to_text(peak_table(Peak(MIB, (holder("numpy", MIB, device=-1),))), 120), "numpy", "host")


def test_empty_peak_has_no_share() -> None:
    text = to_text(peak_table(Peak(0, (holder("numpy", 0),))), 120)
    assert "%" not in text


def test_stats_show_pools_and_frameworks() -> None:
    text = to_text(stats_table(stats()), 120)
    assert "64.0 MiB" in line_with(text, "reserved", "from", "upstream")
    assert line_with(text, "cupy", "3.00", "MiB", "8.00", "16.0", "17")


def test_stats_are_silent_about_faults_that_did_not_happen() -> None:
    assert "foreign frees" not in to_text(stats_table(stats()), 120)


def test_stats_show_faults_that_happened() -> None:
    text = to_text(stats_table(stats(foreign_frees=7)), 120)
    assert "7" in line_with(text, "foreign", "frees")


def test_status_gives_the_reason_for_what_is_not_hooked() -> None:
    status = Status(
        installed=True,
        backend="host",
        reason="no CUDA driver",
        devices=(),
        frameworks={"numpy": "hooked", "cupy": "not installed [optional]"},
        numpy_scope="process",
        track="sites",
        pools=(Generation(3, -1, "host", False, MIB, 5, 512 * MIB),),
    )
    text = to_text(status_table(status), 120)
    assert line_with(text, "numpy", "hooked")
    assert line_with(text, "cupy", "not", "installed", "[optional]")
    assert line_with(text, "reason", "no", "CUDA", "driver")
    assert line_with(text, "3", "host", "retired", "1.00", "MiB", "5", "512")


def test_status_without_a_bridge_has_no_pools() -> None:
    status = Status(
        installed=False,
        backend=None,
        reason="",
        devices=(),
        frameworks={},
        numpy_scope=None,
        track="sites",
        pools=(),
    )
    text = to_text(status_table(status), 120)
    assert line_with(text, "installed", "no")
    assert "reserved" not in text
