"""NumPy inside CUDA host functions, on a real device: it waits for nothing, also when the pool is full."""

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy")]
MIB = 1 << 20


@pytest.fixture
def small(rmm_pool: Any, cupy: Any, gpu_install: Any) -> Iterator[Any]:
    """The bridge with at most 128 MiB."""
    import rmm_managed_bridge as bridge

    gpu_install(bridge, frameworks=["numpy", "cupy"], maximum_pool_size="128MiB")
    yield bridge
    cupy.cuda.Device().synchronize()
    bridge.uninstall()
    gc.collect()


def in_a_host_function(stream: Any, function: Callable[[], Any]) -> tuple[threading.Event, list[Any]]:
    """Enqueue `function`; return what is set when it is over, and what it returned or raised."""
    over, results = threading.Event(), []

    def call(_: object) -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)
        over.set()

    stream.launch_host_func(call, None)
    return over, results


def test_arrays_are_made_and_freed_there(small: Any, cupy: Any) -> None:
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.ones(1 << 14)
        over, results = in_a_host_function(stream, lambda: float(np.ones(100).sum()))
        y = x + 1
        assert over.wait(30)
        stream.synchronize()
    assert results == [100.0]
    assert float(y[0]) == 2


def test_a_full_pool_is_not_waited_for(small: Any, cupy: Any) -> None:
    """What was freed waits for work behind the function itself."""
    begin = threading.Event()
    array = np.ones(96 * MIB // 8)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        view = small.as_cupy(array)
        stream.launch_host_func(lambda _: begin.wait(30), None)
        over, results = in_a_host_function(stream, lambda: float(np.ones(64 * MIB // 8)[-1]))
        view += 1
    del view, array
    begin.set()
    assert over.wait(30), "it waits for work that waits for it"
    stream.synchronize()
    assert results == [1.0]


def test_a_shown_array_is_dropped_there(small: Any, cupy: Any) -> None:
    arrays = [np.ones(MIB)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        view = small.as_cupy(arrays[0])
        view += 1
        del view
        over, results = in_a_host_function(stream, arrays.clear)
    assert over.wait(30)
    stream.synchronize()
    assert results == [None]
    assert np.ones(MIB).sum() == MIB
