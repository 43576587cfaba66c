"""cuDF allocates from RMM's current resource, so nothing need be done for it. Skipped where it is not installed."""

import gc
import warnings

import numpy as np
import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy")]


def test_what_cudf_allocates_is_tracked_as_rmms(rmm_pool) -> None:
    import rmm_managed_bridge as bridge

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Before the bridge is installed: it sets an allocator for CuPy.
        cudf = pytest.importorskip("cudf", exc_type=ImportError)
    with bridge.installed(frameworks=["numpy"]):
        series = cudf.Series(np.arange(1 << 18, dtype="i8"))
        held = [each for each in bridge.snapshot() if each.framework == "rmm"]
        assert sum(each.requested_bytes for each in held) >= 2 << 20
        assert {each.kind for each in held} == {"managed"}
        assert int(series.sum()) == (1 << 18) * ((1 << 18) - 1) // 2
        del series, held
        gc.collect()
        assert "rmm" not in bridge.snapshot().by("framework")
