"""Whose tests are run, which of them, and where they are found."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


def _numpy(sources: Path | None) -> Path:
    import numpy as np

    return Path(np.__file__).parent


def _below(folder: str) -> Callable[[Path | None], Path]:
    def find(sources: Path | None) -> Path:
        if sources is None or not (sources / folder).is_dir():
            raise SystemExit(f"no folder {folder!r} in {sources}: see the README in tests/peers, and pass --sources")
        return sources / folder

    return find


@dataclass(frozen=True)
class Suite:
    """One library's tests."""

    name: str
    root: Callable[[Path | None], Path]
    """From ``--sources`` to the folder that the paths below are in."""
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Of pytest."""
    backend: str = "managed"
    frameworks: tuple[str, ...] = ()
    """What the bridge is installed for."""
    full: tuple[str, ...] = ("",)

    @property
    def explained(self) -> Path:
        """The file with the tests that are known to differ."""
        return HERE / "explained" / f"{self.name}.txt"


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="numpy",
            root=_numpy,
            tests=(
                "_core/tests/test_mem_policy.py",
                "_core/tests/test_mem_overlap.py",
                "_core/tests/test_multiarray.py::TestResize",
                "_core/tests/test_multiarray.py::TestMethods",
                "_core/tests/test_multiarray.py::TestCreation",
                "_core/tests/test_multiarray.py::TestAttributes",
                "_core/tests/test_multiarray.py::TestFromBuffer",
                "_core/tests/test_multiarray.py::TestIO",
                "_core/tests/test_multiarray.py::TestPickling",
                "_core/tests/test_multithreading.py",
                "_core/tests/test_regression.py",
                "_core/tests/test_item_selection.py",
                "_core/tests/test_umath.py::TestOut",
                "_core/tests/test_umath.py::TestSpecialMethods",
            ),
            options=("-m", "not slow", "--hypothesis-profile", "np.test() profile"),
            backend="host",
            frameworks=("numpy",),
        ),
        Suite(
            name="cupy",
            root=_below("tests"),
            tests=(
                "cupy_tests/cuda_tests/test_memory.py",
                "cupy_tests/cuda_tests/test_memory_hook.py",
                "cupy_tests/cuda_tests/test_stream.py",
                "cupy_tests/cuda_tests/test_graph.py",
                "cupy_tests/core_tests/test_dlpack.py",
                "cupy_tests/creation_tests",
            ),
            options=("-m", "not slow and not multi_gpu"),
            frameworks=("numpy", "cupy"),
            full=(
                "cupy_tests/core_tests",
                "cupy_tests/cuda_tests",
                "cupy_tests/creation_tests",
                "cupy_tests/fft_tests",
            ),
        ),
        Suite(
            name="warp",
            root=_below("warp/tests"),
            tests=(
                "test_allocator.py",
                "test_allocation_tracker.py",
                "test_graph.py",
                "cuda/test_unified_memory.py",
                "cuda/test_mempool.py",
                "cuda/test_capture_mode.py",
                "cuda/test_capture_release.py",
                "cuda/test_array_fill_capture.py",
                "cuda/test_ipc.py",
                "cuda/test_pinned.py",
                "cuda/test_streams.py",
            ),
            options=("--import-mode=importlib", "-o", "python_functions=", "-k", "not TestRmmAllocator"),
            frameworks=("numpy", "warp"),
        ),
        Suite(
            name="rmm",
            root=_below("python/rmm/rmm/tests"),
            tests=(
                "test_callback_memory_resource.py",
                "test_failure_callback_resource_adaptor.py",
                "test_lifecycle.py",
                "test_limiting_resource_adaptor.py",
                "test_statistics.py",
                "test_stream.py",
                "test_tracking_resource_adaptor.py",
            ),
            frameworks=("rmm",),
        ),
    )
}
