"""compute-sanitizer and debug mode; in a file of its own, since a program under it takes long."""

import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy")]


def test_compute_sanitizer_sees_where_a_block_ends(tmp_path) -> None:
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("there is no compute-sanitizer here")
    program = """
import cupy, numpy, rmm
import rmm_managed_bridge as bridge
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="64MiB", maximum_pool_size="256MiB")
bridge.install(frameworks=["cupy"], pool="debug", maximum_pool_size="128MiB")
array = cupy.empty(1000, "f4")
kernel = cupy.RawKernel('extern "C" __global__ void poke(float* x, long long at) { x[at] = 1; }', "poke")
kernel((1,), (1,), (array, numpy.int64(999)))
cupy.cuda.runtime.deviceSynchronize()
print("so far so good", flush=True)
kernel((1,), (1,), (array, numpy.int64(1 << 22)))
try:
    cupy.cuda.runtime.deviceSynchronize()
except Exception:
    pass
"""
    script = tmp_path / "poke.py"
    script.write_text(program)
    done = subprocess.run(
        [tool, "--error-exitcode", "77", sys.executable, "-P", script],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "not supported" in done.stdout.lower():
        pytest.skip("compute-sanitizer does not work on this machine")
    assert "so far so good" in done.stdout, done.stdout + done.stderr
    assert "Invalid __global__ write" in done.stdout, done.stdout + done.stderr
