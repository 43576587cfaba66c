"""A check that cannot fail is no check: each rule of order, taken out of the core, must be missed by the tests here.

Each mutant is the library compiled from changed sources, under the modules as they are. That takes a minute, so it is
done with BRIDGE_MUTANTS=1 only, or with a part of a mutant's name, from a checkout and where the core can be built.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import fake_cuda
import pytest
from fake_cuda import child as fake_child

import rmm_managed_bridge

WANTED = os.environ.get("BRIDGE_MUTANTS", "")
PACKAGE = Path(rmm_managed_bridge.__file__).parent
TESTS = Path(__file__).parent
# The fast ones first: the first failure is enough.
SUITES = [
    "frees",
    "hot_path",
    "streams",
    "hints",
    "stream_order",
    "host_order",
    "process",
    "capture",
    "capture_starves",
    "deferred",
    "quarantine",
    "gil",
    "in_hand",
    "budget",
    "host_functions",
    "wait_timeout",
    "machine",
]
LIBRARY = "librmm_managed_bridge.so"
PATIENCE_SECONDS = 1200


class Mutant(NamedTuple):
    """What is left out: `old` in a source becomes `new`."""

    source: str
    old: str
    new: str


NOT_CAPTURING = "capture_status(stream.handle) != CU_STREAM_CAPTURE_STATUS_NONE"
MUTANTS = {
    "a thief does not wait": Mutant(
        "pool/synchronize.cpp", "ordered && events_->stream_waits(stream, wait.event)", "ordered"
    ),
    "no quarantine": Mutant("pool/free.cpp", "if (waits.empty()) {", "if (true) {"),
    "the host takes what streams freed": Mutant("pool/free.cpp", "(!shown && !on_stream)", "!shown"),
    "views are forgotten": Mutant("pool/synchronize.cpp", " || !mark(process_, block, Block::kShown)", ""),
    "only the last view counts": Mutant(
        "pool/free.cpp",
        "for (const std::uint16_t index : uses) pins.add(lanes_.at(index));",
        "if (!uses.empty()) pins.add(lanes_.at(uses.back()));",
    ),
    "held streams that nobody told of are left out": Mutant("pool/free.cpp", "  if (cautious) {\n", "  if (false) {\n"),
    "what the CPU frees is ready at once": Mutant("pool/pool.hpp", "options_.cautious && lanes_.any_work()", "false"),
    "what the CPU frees waits for no stream": Mutant("pool/free.cpp", "if (lane.held() && used) pins.add(lane);", ""),
    "a borrowed stream's event is lost": Mutant("pool/free.cpp", "lane.events.push_back(event);", ""),
    "quarantine ends at the first look": Mutant(
        "streams/quarantine.hpp",
        "point.event == nullptr || !point.event->done.load(std::memory_order_acquire)",
        "false",
    ),
    "a borrowed lane counts as finished": Mutant("pool/wait.cpp", "const bool over =", "const bool over = true ||"),
    "at the budget large blocks wait for nothing": Mutant(
        "pool/room.cpp",
        "quarantine(std::move(blocks), bytes, {{index, event}});",
        "quarantine(std::move(blocks), bytes, {});",
    ),
    "what a thread has in hand is nowhere": Mutant(
        "pool/pool.hpp", "if (std::exchange(begun_, true)) return;", "return;"
    ),
    "a full batch is not in hand": Mutant(
        "pool/free.cpp",
        "deferred.front.begin_batch();\n      in_hand.begin();",
        "deferred.front.begin_batch();",
    ),
    "an event stands for a lane that came to be held": Mutant(
        "pool/free.cpp", "  if (lane.held()) {\n    // Since", "  if (false) {\n    // Since"
    ),
    "a lane is closed without an event": Mutant("pool/trim.cpp", "held = lane.held();", "held = false;"),
    "a view does not wait": Mutant(
        "pool/synchronize.cpp", "if (!events_->stream_waits(stream, event)) return Refusal::capturing;", ""
    ),
    "a front takes what was freed on another stream": Mutant(
        "pool/front.hpp", " || (stream != nullptr && key != stream->key)", ""
    ),
    "a front takes what a view showed": Mutant("pool/pool.hpp", "if (shown || !put_front(", "if (!put_front("),
    "every stream counts as held": Mutant(
        "streams/lane_table.cpp",
        "(stream.legacy() || (stream.per_thread() && stream.key != StreamRef::kUnseenKey))",
        "(true)",
    ),
    "an unseen per-thread stream counts as held": Mutant(
        "streams/lane_table.cpp", " && stream.key != StreamRef::kUnseenKey", ""
    ),
    "a guess is as good as an id": Mutant("pool/free.cpp", "stream.guessed || KeepGil::kept() ?", "KeepGil::kept() ?"),
    "a host function is a thread as any other": Mutant(
        "pool/pool.hpp", "driver_ != nullptr && driver_->in_host_function()", "false"
    ),
    "the cpu does not wait": Mutant(
        "pool/synchronize.cpp", "if (!events_->synchronize(event)) refusal = Refusal::bad_stream;", ""
    ),
    "streams are known by handle": Mutant(
        "pool/stream_lookup.hpp",
        "{events_->id_of(handle), handle}",
        "{reinterpret_cast<std::uint64_t>(handle), handle}",
    ),
    "a remembered lane may be another stream's": Mutant(
        "pool/stream_lookup.hpp", "seen.lane->front.key.load(std::memory_order_acquire) == seen.key", "true"
    ),
    "a remembered lane may be another pool's": Mutant("pool/stream_lookup.hpp", "seen.lane->home == &lanes_ &&", ""),
    "a captured stream is asked for its id": Mutant(
        "pool/stream_lookup.cpp", "if (latest != 0) out.key = latest;", "out = {events_->id_of(handle), handle};"
    ),
    "a held stream is asked for its id": Mutant(
        "pool/stream_lookup.hpp",
        "if (recall(handle, out)) [[likely]]\n    return Refusal::none;\n  if (!find_held(handle, out)) out =",
        "out =",
    ),
    "a sign counts for what came after it": Mutant(
        "streams/quarantine.cpp", "if (point.batch->number >= later) break;", ""
    ),
    "a stream that is seen again is no sign": Mutant(
        "pool/allocate.cpp", "if (!want.held) seen_again(want.lane, stream);", ""
    ),
    "per-thread streams are one": Mutant("driver/events.cpp", "id_of(stream.handle) != stream.key", "false"),
    "a captured per-thread stream is asked for its id": Mutant(
        "driver/events.cpp",
        f"if ({NOT_CAPTURING}) return Recorded::capturing;\n  if (stream.per_thread()",
        f"if (!stream.per_thread() && {NOT_CAPTURING}) return Recorded::capturing;\n  if (stream.per_thread()",
    ),
    "captured events are kept": Mutant("driver/events.cpp", f"!stream.legacy() && {NOT_CAPTURING}", "false"),
    "a per-thread stream is looked at in the current context": Mutant(
        "pool/stream_lookup.cpp", "const DriverScope scope(driver_, events_->context());", ""
    ),
    "an event on a barred legacy stream": Mutant(
        "driver/events.cpp",
        f"if ({NOT_CAPTURING}) return Recorded::capturing;\n  if (stream.per_thread()",
        f"if (!stream.legacy() && {NOT_CAPTURING}) return Recorded::capturing;\n  if (stream.per_thread()",
    ),
    "a wait on a barred legacy stream": Mutant(
        "driver/events.cpp", f"if (stream.legacy() && {NOT_CAPTURING}) return false;", ""
    ),
    "captures are served": Mutant(
        "pool/stream_lookup.hpp",
        "if (events_->capture_status(handle) != CU_STREAM_CAPTURE_STATUS_NONE) return Refusal::capturing;",
        "",
    ),
    "the legacy stream is asked for its id": Mutant(
        "pool/stream_lookup.hpp", "{{StreamRef::kLegacyKey, nullptr}}", "{{events_->id_of(nullptr), nullptr}}"
    ),
    "the capture mode is not relaxed": Mutant(
        "driver/driver.hpp", "mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;", "mode_ = CU_STREAM_CAPTURE_MODE_GLOBAL;"
    ),
    "no context is pushed": Mutant("driver/driver.hpp", "pushed_(context != nullptr)", "pushed_(false)"),
    "waits hold the GIL": Mutant(
        "pool/process.hpp",
        "process.release_gil == nullptr || KeepGil::kept() ? nullptr : process.release_gil()",
        "nullptr",
    ),
    "an event is recorded with the GIL held": Mutant(
        "pool/free.cpp",
        "  const WithoutGil without(process_);\n  std::size_t position = 0;",
        "  std::size_t position = 0;",
    ),
    "a lock of the caller's is not respected": Mutant(
        "pool/allocate.cpp", "if (KeepGil::kept()) return grow", "if (false) return grow"
    ),
    "age is not asked in a capture": Mutant("pool/free.cpp", "if (younger && !each.must) {", "if (!each.must) {"),
    "what a capture uses does not wait for it": Mutant(
        "pool/free.cpp", "if (younger && !each.must) {", "if (younger) {"
    ),
    "one capture is as another": Mutant(
        "streams/lane_table.hpp", "return lane.capture == capture && born_ns", "return lane.capture != 0 && born_ns"
    ),
    "blocks are freed twice": Mutant(
        "pool/tracked_pool.hpp",
        "if ((flags & Block::kLive) == 0) [[unlikely]]\n      return refuse_free(",
        "if (false)\n      return refuse_free(",
    ),
    "advice outlives its block": Mutant(
        "pool/tracked_pool.hpp",
        "if ((flags & Block::kHinted) != 0) [[unlikely]]\n      pool->end_hints(found.start);",
        "",
    ),
    "a resized block takes its advice along": Mutant(
        "pool/resize.cpp",
        "end(found, old_bytes, 0, flags, nullptr);",
        "end(found, old_bytes, 0, flags & ~Block::kHinted, nullptr);",
    ),
    "a resize copies at once": Mutant(
        "pool/resize.cpp", "if ((found.block->flags.load() & Block::kShown) != 0) {", "if (false) {"
    ),
    "a resize forgets that its block was shown": Mutant(
        "pool/resize.cpp",
        "end(found, old_bytes, 0, flags, nullptr);",
        "end(found, old_bytes, 0, flags & ~Block::kShown, nullptr);",
    ),
    "advice on a neighbour's page is undone": Mutant("hints/hint_table.hpp", "if (it == found ||", "if (true ||"),
    "advice on a shared page stays for ever": Mutant("hints/hint_table.hpp", "other.advice |= ended.advice;", ""),
    "a forked child frees": Mutant(
        "pool/tracked_pool.hpp",
        "if (process.may_not_act() && !acts_on(process, found)) [[unlikely]]\n      return Freed::ignored;",
        "",
    ),
}

# Races between a call of the driver and our lock, or between a look and its use: the machine that acts inside of driver
# calls has to find each of them alone.
INSIDE_SUITE = ["machine_inside"]
INSIDE_CALLS = {
    "a free on a borrowed stream forgets events that came meanwhile": Mutant(
        "pool/free.cpp",
        "std::erase_if(lane.events,",
        "lane.events.erase(lane.events.begin(), lane.events.end() - 1);\n  std::erase_if(lane.events,",
    ),
    "a stream is let go though it was used meanwhile": Mutant(
        "pool/trim.cpp", "const bool unused = lane.pins == 1 &&", "const bool unused = true ||"
    ),
    "an event counts for what was freed after it": Mutant(
        "pool/free.cpp",
        "sign_all({waits.begin() + first, waits.end()}, later);\n  quarantine(",
        "sign_all({waits.begin() + first, waits.end()}, ~std::uint64_t{0});\n  quarantine(",
    ),
    "pins hold nothing": Mutant("pool/pool.hpp", "      ++lane.pins;\n", "      ++lane.pins, --lane.pins;\n"),
    "a stream is let go while a call uses it": Mutant(
        "pool/trim.cpp", "|| lane.pins != 0 || lane.named_count", "|| lane.named_count"
    ),
    "a capture that ends inside is not seen": Mutant(
        "driver/events.cpp",
        f"  if ({NOT_CAPTURING}) return Recorded::capturing;\n  if (stream.per_thread()",
        "  if (stream.per_thread()",
    ),
    "an allocation does not pin its lane": Mutant("pool/allocate.cpp", "pins.add(lanes_.at(want.lane));", ""),
    "a free does not pin the borrowed lane": Mutant(
        "pool/free.cpp", "pins.add(lane);\n        borrowed = &lane;", "borrowed = &lane;"
    ),
    "a free does not pin the stated lane": Mutant(
        "pool/free.cpp", "pins.add(lane);\n      given", "if (lane.held()) pins.add(lane);\n      given"
    ),
    "a lane that is closed gives what was freed after its event": Mutant(
        "pool/trim.cpp",
        "if (retire != nullptr) close_front(lane);",
        "drain(lane);\n    bytes += lane.empty_into(blocks);\n    if (retire != nullptr) close_front(lane);",
    ),
    "a thief takes what was freed after its event": Mutant(
        "pool/synchronize.cpp",
        "    if (!ordered) {\n",
        """    drain(*from);
    auto& late = from->bins[want.size.index];
    bytes += late.size() * want.size.bytes;
    from->free_bytes -= late.size() * want.size.bytes;
    blocks.insert(blocks.end(), late.begin(), late.end());
    late.clear();
    if (!ordered) {
""",
    ),
}

FORK_SUITES = ["fork_devices", "fork_copies", "fork_sharing"]
FORKS = {
    "a fork does not wait for the work on what it copies": Mutant(
        "pool/fork_copying.cpp",
        "const Ended ended = each.use.pool->events()->look(event);",
        "const Ended ended = Ended::yes;",
    ),
    "a fork reads what a device has by the CPU": Mutant(
        "pool/fork_copying.cpp", "span->side == Side::gpu || (flags & Block::kShown) != 0", "false"
    ),
    "a fork copies what has not changed": Mutant(
        "pool/fork_copying.cpp", "if (std::memcmp(to, from, step) != 0) {", "{"
    ),
    "a fork lets memory go back that it reads": Mutant(
        "pages/upstream_gate.hpp", "if (!gate_.closed_.load()) return;", "return;"
    ),
    "copies for forks stay for ever": Mutant(
        "pool/fork_copy.cpp", "forks.keep_until_ns.load() - steady_time_ns()", "1'000'000"
    ),
    "a fork forgets what the CPU was shown": Mutant(
        "pool/block_calls.cpp", "Pool::mark(*process, found.block, Block::kOnCpu)", ""
    ),
    "a fork shows old copies": Mutant(
        "pages/fork_mirror.cpp",
        "tile->second.known = tile->second.wanted;",
        "tile->second.known |= tile->second.wanted;",
    ),
    "a child of a fork has what shares a page": Mutant("pool/fork_copy.cpp", "there == 0 || !used ||", "there == 0 ||"),
}

ALL = {**MUTANTS, **INSIDE_CALLS, **FORKS}

wanted = pytest.mark.skipif(not WANTED, reason="set BRIDGE_MUTANTS=1 to build the core once for each mutant")
pytestmark = pytest.mark.timeout(2 * PATIENCE_SECONDS)


def test_every_mutant_leaves_out_something_that_is_there() -> None:
    native = TESTS.parents[1] / "rmm_managed_bridge" / "_native" / "cpp"
    assert [name for name, each in ALL.items() if each.old not in (native / each.source).read_text()] == []


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the package whose core has been built there, without optimisation."""
    if not (PACKAGE / "_native" / "cpp" / "pool" / "pool.hpp").exists() or fake_cuda.cuda_include() is None:
        pytest.skip("the sources of the core and the CUDA headers are needed")
    folder = tmp_path_factory.mktemp("mutants")
    shutil.copytree(PACKAGE, folder / "source" / "rmm_managed_bridge")
    source = folder / "source" / "rmm_managed_bridge" / "_native"
    options = [
        "-G",
        "Ninja",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_CXX_FLAGS=-O0",
        "-DCMAKE_BUILD_TYPE=None",
    ]
    subprocess.run(["cmake", "-S", source, "-B", folder / "build", *options], check=True, stdout=subprocess.DEVNULL)
    return folder


def build_core(workshop: Path) -> Path:
    """Build the core as the sources are now; return the folder of a package that has it."""
    command = ["ninja", "-C", workshop / "build", LIBRARY]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, f"the mutant does not compile: {built.stdout[-2000:]}"
    root = workshop / "mutant"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(workshop / "source", root)
    shutil.copy(workshop / "build" / LIBRARY, root / "rmm_managed_bridge" / "_native")
    return root


def first_failure(root: Path, config: pytest.Config, suites: list[str]) -> str | None:
    """Run the suites against the package in `root`; return the first failing test, or None if all pass."""
    files = [str(TESTS / f"test_pool_{name}.py") for name in suites]
    command = [*fake_child.pytest_command(files, config), "-x", "--tb=no"]
    environment = {
        **os.environ,
        fake_child.CHILD: str(root / "reports"),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "BRIDGE_MACHINE_RAW": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(root),
    }
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "no end"
    if ended.returncode == 0:
        return None
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"exit code {ended.returncode}: {ended.stdout[-500:]}{ended.stderr[-500:]}"


@wanted
@pytest.mark.parametrize("name", [name for name in ALL if WANTED in ("", "1") or WANTED in name])
def test_the_mutant_is_caught(workshop: Path, pytestconfig: pytest.Config, name: str) -> None:
    mutant = ALL[name]
    source = workshop / "source" / "rmm_managed_bridge" / "_native" / "cpp" / mutant.source
    text = source.read_text()
    source.write_text(text.replace(mutant.old, mutant.new))
    try:
        root = build_core(workshop)
    finally:
        source.write_text(text)
    suites = INSIDE_SUITE if name in INSIDE_CALLS else FORK_SUITES if name in FORKS else SUITES
    caught_by = first_failure(root, pytestconfig, suites)
    assert caught_by is not None, "no test noticed"
    print(f"{name}: caught by {caught_by}")


@wanted
def test_the_core_itself_passes(workshop: Path, pytestconfig: pytest.Config) -> None:
    """Otherwise the failures above say nothing."""
    assert first_failure(build_core(workshop), pytestconfig, [*SUITES, *INSIDE_SUITE, *FORK_SUITES]) is None
