"""Pool arrays that are pickled, copied, saved and loaded: whose memory the results lie in: N9."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rmm_managed_bridge as bridge

MIB = 1 << 20
SMALL = 800
"""NumPy copies a state of up to 1,000 bytes into an array of its own when it loads one of the older protocols."""


@pytest.mark.behaviour("N9")
@pytest.mark.parametrize("size", [SMALL, 4 * MIB])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_hold_values_and_never_addresses(protocol: int, size: int) -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        array = -1 - np.arange(size // 8)  # whose bytes look like no address
        stream = pickle.dumps(array, protocol)
        assert array.ctypes.data.to_bytes(8, "little") not in stream
        assert b"rmm_managed_bridge" not in stream
        found = pickle.loads(stream)
        assert (found == array).all()
        owned = protocol < 5 and size == SMALL  # else it lies in the bytes that the unpickler made
        assert bridge.owns(found) == owned
        assert (bridge.allocation_of(found) is not None) == owned
        found += 1
        assert int(array[1]) == -2, "it is memory of its own"
        del found, array


@pytest.mark.behaviour("N9")
def test_out_of_band_buffers_of_pool_arrays_stay_in_the_pool() -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        array = np.arange(4 * MIB // 8)
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(array, 5, buffer_callback=buffers.append)
        assert len(stream) < 1000
        found = pickle.loads(stream, buffers=buffers)
        assert found.ctypes.data == array.ctypes.data
        assert bridge.owns(found)
        del array, buffers
        assert int(found[-1]) == 4 * MIB // 8 - 1
        del found
        assert bridge.stats().current_count == 0


@pytest.mark.behaviour("N9")
@pytest.mark.parametrize("into", ["bytes", "pool"])
def test_out_of_band_buffers_lie_where_their_receiver_put_them(into: str) -> None:
    """As between processes: `bytes` are Python's, and an array that was made to receive them is the pool's."""
    with bridge.installed("host", frameworks=["numpy"]):
        array = np.arange(4 * MIB // 8)
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(array, 5, buffer_callback=buffers.append)
        received: list[Any] = [each.raw().tobytes() for each in buffers]
        if into == "pool":
            received = [np.frombuffer(each, "u1").copy() for each in received]
        found = pickle.loads(stream, buffers=received)
        assert bridge.owns(found) == (into == "pool")
        assert found.ctypes.data != array.ctypes.data
        assert found.flags.writeable == (into == "pool")
        assert (found == array).all()
        del array, buffers, found, received


@pytest.mark.behaviour("N9")
def test_copies_and_files_come_from_the_pool_where_numpy_allocates_them(tmp_path: Path) -> None:
    with bridge.installed("host", frameworks=["numpy"]):
        array = np.arange(4 * MIB // 8)
        stream = io.BytesIO()
        np.save(stream, array)
        stream.seek(0)
        file = tmp_path / "array.npy"
        np.save(file, array)
        found = {
            "copy": copy.copy(array),
            "deepcopy": copy.deepcopy(array),
            "load from a stream": np.load(stream),
            "load from a file": np.load(file),
            "slice": array[5:],
            "load, mapped": np.load(file, mmap_mode="r"),
            "frombuffer": np.frombuffer(array.tobytes(), array.dtype),
        }
        assert {name: bridge.owns(each) for name, each in found.items()} == {
            name: name not in ("load, mapped", "frombuffer") for name in found
        }
        assert all((each[-5:] == array[-5:]).all() for each in found.values())
        del array, found
