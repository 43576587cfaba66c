"""Hints without a device: A2, rounding, what an array spans, and the room that calls the driver."""

import enum
import os
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rmm_managed_bridge as bridge
from rmm_managed_bridge import HintSkip
from rmm_managed_bridge.arrays.address import Address, extent_of, is_dense
from rmm_managed_bridge.config import Hints, read_config
from rmm_managed_bridge.hints import driver, pages
from rmm_managed_bridge.hints.locations import CPU, name_of, place_of

MIB = 1 << 20


def skipped_since(before: dict[str, int]) -> dict[str, int]:
    after = bridge.stats().hints_skipped
    return {reason: count - before.get(reason, 0) for reason, count in after.items() if count != before.get(reason, 0)}


@pytest.mark.behaviour("A2")
def test_hints_on_the_host_backend_are_skipped_with_a_reason() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        before = dict(bridge.stats().hints_skipped)
        array = np.ones(MIB)
        results = [
            bridge.prefetch(array, 0),
            bridge.prefetch(array, "cpu"),
            bridge.advise(array, read_mostly=True),
            bridge.discard(array),
        ]
        for result in results:
            assert not result and result.reason == HintSkip.HOST
            assert "host memory" in str(result)
        assert skipped_since(before) == {"host memory": 4}
        assert bridge.residency(array).reason == HintSkip.HOST
        with pytest.raises(bridge.BridgeError, match="prefetch skipped: host memory"):
            bridge.prefetch(array, 0, strict=True)
        assert (array == 1).all()
        del array


@pytest.mark.behaviour("A2")
def test_hints_on_no_bytes_and_on_nothing_are_skipped() -> None:
    assert bridge.prefetch(np.empty((3, 0)), 0).reason == HintSkip.EMPTY
    assert bridge.prefetch([], 0).reason == HintSkip.NOTHING_ASKED
    assert bridge.discard(np.frombuffer(bytearray(100), "u1")).reason == HintSkip.FOREIGN


def test_hints_in_use_do_nothing_on_the_host_backend() -> None:
    with (
        pytest.warns(bridge.BridgeWarning, match="no effect on the host backend"),
        bridge.installed("host", frameworks=["numpy"], hints="device"),
    ):
        before = bridge.stats()
        array = np.ones(MIB)
        with bridge.using_hints("read_mostly"), bridge.tag("table", hints=Hints("host", min_bytes=1)):
            assert bridge.as_numpy(array) is array
        assert bridge.as_numpy(array) is array
        assert bridge.stats().hints_done == before.hints_done
        del array


@given(st.integers(0, 1 << 48), st.integers(0, 1 << 40), st.sampled_from([4096, 1 << 16]))
def test_pages_outwards_have_all_of_the_bytes_and_inwards_nothing_else(low: int, size: int, page: int) -> None:
    start, end = pages.outwards(low, size, page)
    assert start % page == end % page == 0
    assert start <= low < start + page and end - page < low + size <= end
    start, end = pages.inwards(low, size, page)
    assert start % page == end % page == 0
    if start != end:
        assert low <= start < low + page and end <= low + size < end + page
    else:
        assert size < 2 * page, "a range of two pages has a whole one in it"


@given(st.data())
def test_what_an_array_spans_and_whether_it_has_holes(data: st.DataObject) -> None:
    """Against the set of the addresses of all its bytes."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = np.zeros(shape, data.draw(st.sampled_from(["u1", "<f4", "V3"])))
    piece = whole[tuple(data.draw(st.slices(length)) for length in shape)]
    piece = piece.transpose(data.draw(st.permutations(range(piece.ndim))))
    if data.draw(st.booleans()):
        piece = np.broadcast_to(piece, (2, *piece.shape))
    address = Address(piece.__array_interface__["data"][0], piece.shape, piece.strides, piece.dtype.str)
    indices = np.ndindex(*piece.shape)
    starts = {address.ptr + sum(i * s for i, s in zip(index, piece.strides, strict=True)) for index in indices}
    covered = {start + byte for start in starts for byte in range(piece.itemsize)}
    low, size = extent_of(address)
    if not covered:
        assert size == 0
        return
    assert (low, low + size) == (min(covered), max(covered) + 1)
    assert is_dense(address) == (len(covered) == size)


class WarpDevice:
    def __init__(self, ordinal: int) -> None:
        self.is_cpu, self.ordinal = ordinal < 0, ordinal


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("cpu", CPU),
        ("HOST", CPU),
        ("cuda:3", 3),
        (2, 2),
        (WarpDevice(1), 1),
        (WarpDevice(-1), CPU),
        (types.SimpleNamespace(type="cpu", index=None), CPU),
        (types.SimpleNamespace(type="cuda", index=1), 1),
        (types.SimpleNamespace(id=4), 4),
        (types.SimpleNamespace(device_id=5), 5),
        (type("Host", (), {})(), CPU),
    ],
)
def test_places_of_all_frameworks(value: Any, place: int) -> None:
    assert place_of(value) == place
    assert place_of(name_of(place)) == place


def test_hints_come_from_the_argument_the_environment_or_are_none() -> None:
    environment = {"RMM_BRIDGE_HINTS": "host:4MiB"}
    assert read_config(environment=environment).hints == Hints("host", 4 << 20)
    assert read_config(hints=Hints.device, environment=environment).hints == Hints("device", 1 << 20)
    assert read_config(environment={}).hints == Hints.none
    assert str(Hints("device", "2MiB")) == "device from 2.00 MiB"
    with pytest.raises(bridge.ConfigError, match="RMM_BRIDGE_HINTS='fast' is not one of"):
        read_config(environment={"RMM_BRIDGE_HINTS": "fast"})


def test_hugepages_are_said_by_hints_the_argument_or_the_environment_and_kept_in_one_place() -> None:
    never, environment = Hints("host", hugepages="never"), {"RMM_BRIDGE_HUGEPAGES": "always"}
    for config in (
        read_config(hints=never, environment={}),
        read_config(hints=never, hugepages="never", environment={}),
        read_config(hints="host", hugepages="never", environment={}),
        read_config(hints=never, environment=environment),  # an argument goes before the environment
        read_config(environment={"RMM_BRIDGE_HINTS": "host", "RMM_BRIDGE_HUGEPAGES": "never"}),
    ):
        assert (config.hints, config.hugepages) == (Hints.host, "never")
        assert config.given == {"hints", "hugepages"}
    plain = read_config(hints=Hints("host"), environment=environment)
    assert (plain.hints, plain.hugepages) == (Hints.host, "always")
    assert read_config(hints="host", environment={}).given == {"hints"}
    assert str(never) == "host from 1.00 MiB, hugepages never"
    assert str(Hints(hugepages="auto")) == "none, hugepages auto"
    assert never != Hints.host


@pytest.mark.parametrize("short", ["always", "auto"])
def test_hints_and_the_argument_that_differ_about_hugepages_are_an_error(short: str) -> None:
    with pytest.raises(bridge.ConfigError, match=f"hugepages='{short}', but hints=Hints.*'never'.* has another"):
        bridge.install("host", hints=Hints("device", hugepages="never"), hugepages=short)
    assert not bridge.status().installed


@pytest.mark.parametrize("value", ["sometimes", "", True, 1, ("auto",)])
def test_hints_take_the_modes_of_hugepages_and_no_other(value: Any) -> None:
    with pytest.raises(bridge.ConfigError, match=r"is not one of 'auto', 'always', 'never'"):
        Hints(hugepages=value)


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_contexts_and_tags_cannot_choose_hugepages(mode: str) -> None:
    hints = Hints("device", hugepages=mode)
    for use in (lambda: bridge.using_hints(hints), lambda: bridge.tag("of huge pages", hints=hints)):
        with pytest.raises(bridge.ConfigError, match=r"cannot choose hugepages.*say it in install\(hints=...\)"):
            use()


class Recorder:
    """Stands for `cuda.bindings.driver`: notes each call and lets it succeed."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for kind in ("CUmem_advise", "CUmem_range_attribute", "CUmemLocationType", "CUstream_flags"):
            setattr(self, kind, _Names())

    def CUdeviceptr(self, address: int) -> Any:  # noqa: N802 - the driver's name
        return "pointer", address

    def CUmemLocation(self) -> Any:  # noqa: N802 - the driver's name
        return types.SimpleNamespace()

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_v2") or not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return 0, {"cuDeviceGetCount": 1, "cuStreamCreate": 77}.get(name, -1)

        call.__name__ = name
        return call


class _Names:
    def __getattr__(self, name: str) -> str:
        return name


def test_the_bindings_are_called_with_ranges_places_and_streams() -> None:
    recorder = Recorder()
    room = driver.CudaBindings(recorder)
    room.prefetch([(4096, 8192), (0, 4096)], 3, 7)
    room.advise((4096, 12_288), "SET_ACCESSED_BY", CPU)
    room.discard((4096, 8192), 9)
    assert room.new_stream().ptr == 77
    prefetch, second, advise, discard, stream = recorder.calls
    assert prefetch[:3] == ("cuMemPrefetchAsync", 4096, 4096) and prefetch[4:] == (0, 7)
    assert (prefetch[3].type, prefetch[3].id) == ("CU_MEM_LOCATION_TYPE_DEVICE", 3)
    assert second[1:3] == (0, 4096)
    assert advise[:4] == ("cuMemAdvise", 4096, 8192, "CU_MEM_ADVISE_SET_ACCESSED_BY")
    assert (advise[4].type, advise[4].id) == ("CU_MEM_LOCATION_TYPE_HOST", 0)
    assert discard == ("cuMemDiscardBatchAsync", [("pointer", 4096)], [4096], 1, 0, 9)
    assert stream == ("cuStreamCreate", "CU_STREAM_NON_BLOCKING")


class StubCore:
    """Stands for `cuda.core` and `cuda.core.utils`."""

    LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM = "legacy", "per thread"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.ManagedBuffer = types.SimpleNamespace(from_handle=lambda ptr, size: Buffer(self.calls, ptr, size))
        self.Stream = types.SimpleNamespace(from_handle=lambda handle: ("stream", handle))
        self.Device, self.Host = (lambda number: ("device", number)), (lambda: "host")

    def prefetch_batch(self, stream: Any, buffers: Any, to: Any) -> None:
        self.calls.append(("batch", stream, [(buffer.ptr, buffer.size) for buffer in buffers], to))


class Buffer:
    def __init__(self, calls: list[Any], ptr: int, size: int) -> None:
        object.__setattr__(self, "calls", calls)
        object.__setattr__(self, "ptr", ptr)
        object.__setattr__(self, "size", size)
        add, discard = (lambda place: calls.append(("add", place))), (lambda place: calls.append(("drop", place)))
        object.__setattr__(self, "accessed_by", types.SimpleNamespace(add=add, discard=discard))

    def __setattr__(self, name: str, value: Any) -> None:
        self.calls.append((name, value))

    def prefetch(self, to: Any, *, stream: Any) -> None:
        self.calls.append(("prefetch", self.ptr, self.size, to, stream))

    def discard(self, *, stream: Any) -> None:
        self.calls.append(("discard", self.ptr, self.size, stream))


def test_cuda_core_is_called_in_batches_but_on_the_legacy_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    core = StubCore()
    monkeypatch.setitem(sys.modules, "cuda.core.utils", core)  # type: ignore[arg-type]
    room = driver.CudaCore(Recorder(), core)
    room.prefetch([(0, 4096), (8192, 12_288)], 0, 7)
    room.prefetch([(0, 4096), (8192, 12_288)], CPU, 0)
    room.prefetch([(0, 4096)], CPU, 2)
    room.discard((0, 4096), 7)
    for advice, place in (
        ("SET_READ_MOSTLY", CPU),
        ("UNSET_READ_MOSTLY", CPU),
        ("SET_PREFERRED_LOCATION", 0),
        ("UNSET_PREFERRED_LOCATION", CPU),
        ("SET_ACCESSED_BY", 0),
        ("UNSET_ACCESSED_BY", CPU),
    ):
        room.advise((0, 4096), advice, place)
    assert core.calls == [
        ("batch", ("stream", 7), [(0, 4096), (8192, 4096)], ("device", 0)),
        ("prefetch", 0, 4096, "host", "legacy"),
        ("prefetch", 8192, 4096, "host", "legacy"),
        ("prefetch", 0, 4096, "host", "per thread"),
        ("discard", 0, 4096, ("stream", 7)),
        ("read_mostly", True),
        ("read_mostly", False),
        ("preferred_location", ("device", 0)),
        ("preferred_location", None),
        ("add", ("device", 0)),
        ("drop", "host"),
    ]


@pytest.mark.requires("no_gpu")
@pytest.mark.parametrize("library", ["CudaBindings", "CudaCore"])
def test_the_real_libraries_take_the_arguments_and_miss_only_the_driver(library: str) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    room: driver.HintDriver = driver.CudaBindings(bindings)
    if library == "CudaCore":
        core = pytest.importorskip("cuda.core")
        if not hasattr(core, "ManagedBuffer"):
            pytest.skip("cuda-core has managed memory since 1.1")
        room = driver.CudaCore(bindings, core)
    calls = [
        lambda: room.prefetch([(4096, 8192)], 0, 0),
        lambda: room.prefetch([(4096, 8192), (0, 4096)], CPU, 77),
        lambda: room.advise((4096, 8192), "SET_READ_MOSTLY", CPU),
        lambda: room.advise((4096, 8192), "SET_PREFERRED_LOCATION", 0),
        lambda: room.advise((4096, 8192), "UNSET_ACCESSED_BY", 0),
        lambda: room.discard((4096, 8192), 77),
        lambda: room.attributes((4096, 8192)),
        room.new_stream,
    ]
    for call in calls:
        with pytest.raises(driver.DriverRefusedError) as caught:
            call()
        assert not isinstance(caught.value.__cause__, (TypeError, AttributeError, ValueError)), caught.value


def test_whatever_the_libraries_raise_is_a_refusal() -> None:
    def fail(*arguments: Any) -> tuple[Any, ...]:
        raise RuntimeError("no such function")

    recorder = Recorder()
    recorder.cuMemDiscardBatchAsync = fail  # type: ignore[method-assign]
    room = driver.CudaBindings(recorder)
    with pytest.raises(driver.DriverRefusedError, match="RuntimeError: no such function"):
        room.discard((0, 4096), 1)
    recorder.cuMemDiscardBatchAsync = lambda *_: (enum.IntEnum("CUresult", {"CUDA_ERROR_X": 1})(1),)  # type: ignore[method-assign]
    with pytest.raises(driver.DriverRefusedError, match="CUDA_ERROR_X"):
        room.discard((0, 4096), 1)


def test_the_libraries_are_loaded_with_the_first_hint_and_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, numpy, rmm_managed_bridge as bridge\n"
        "with bridge.installed('host', hints='device'):\n"
        "    bridge.as_numpy(numpy.ones(1 << 20)); bridge.prefetch(numpy.ones(10), 0)\n"
        "print('cuda.core' in sys.modules)  # RMM itself imports cuda.bindings\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert done.stdout == "False\n"
    for missing in ("cuda.core", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, missing, None)
        driver.load.cache_clear()
        if missing == "cuda.core":
            pytest.importorskip("cuda.bindings.driver")
            assert type(driver.load()) is driver.CudaBindings
        else:
            with pytest.raises(driver.NoLibraryError):
                driver.load()
    driver.load.cache_clear()


def test_residency_is_a_sentence() -> None:
    asked = bridge.Residency("cuda:0", "cuda:0", True, "cpu", ("cuda:0",))
    assert str(asked) == (
        "asked for cuda:0; the driver says: last prefetch cuda:0, preferred cpu, accessed by cuda:0, read mostly"
    )
    with bridge.installed("host"):
        assert str(bridge.residency(np.ones(10))).startswith("residency not known: host memory (")
