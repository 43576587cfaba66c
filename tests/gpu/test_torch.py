"""PyTorch on the pool. Each test is a process of its own: PyTorch takes an allocator once, before its first use."""

import itertools

import pytest
from helpers.programs import run_on_gpu as run

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("torch")]

_RMM = """
import gc, rmm, numpy as np
import rmm_managed_bridge as bridge
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="256MiB", maximum_pool_size="2GiB")
"""
_START = "import torch\n" + _RMM


@pytest.mark.behaviour("I5")
def test_the_program_that_once_crashed_runs_and_exits() -> None:
    """RMM's managed pool, 200 tensors of 4 MiB, half of them deleted, and an exit with the others alive."""
    run(
        _START
        + """
bridge.install(frameworks=["torch"])
tensors = [torch.full((1 << 20,), float(i), device="cuda") for i in range(200)]
del tensors[::2]
for i, tensor in enumerate(tensors):
    assert (tensor == 2 * i + 1).all().item(), i
alive = [each for each in bridge.snapshot().allocations if each.requested_bytes == 4 << 20]
assert len(alive) == 100, len(alive)
assert {(each.framework, each.kind, each.device) for each in alive} == {("torch", "managed", 0)}
assert bridge.stats().by("framework")["torch"].current_count >= 100
"""
    )


@pytest.mark.behaviour("L2")
@pytest.mark.parametrize("first", ["torch", "rmm", "bridge", "numpy"])
def test_no_import_order_breaks_the_exit(first: str) -> None:
    lines = {
        "torch": "import torch",
        "rmm": "import rmm",
        "bridge": "import rmm_managed_bridge as bridge",
        "numpy": "import numpy as np",
    }
    others = [name for name in lines if name != first]
    run(
        "\n".join(lines[name] for name in [first, *others])
        + """
rmm.reinitialize(pool_allocator=True, managed_memory=True, initial_pool_size="64MiB", maximum_pool_size="512MiB")
bridge.install(frameworks=["numpy", "torch"])
kept = [torch.ones(1 << 18, device="cuda"), np.ones(1 << 18)]
cycle = [torch.ones(1 << 18, device="cuda")]
cycle.append(cycle)
assert bridge.owns(kept[0]) and bridge.owns(kept[1])
"""
    )


@pytest.mark.behaviour("P5")
def test_what_is_seen_to_come_is_seen_to_go() -> None:
    run(
        _START
        + """
bridge.install(frameworks=["torch"])
torch.empty(10, device="cuda")
gc.collect()
before = bridge.stats()
for _ in range(1000):
    torch.empty(4096, dtype=torch.uint8, device="cuda")
def fail_at_once():
    kept = torch.empty(4096, dtype=torch.uint8, device="cuda")
    raise KeyError
for _ in range(100):
    try:
        fail_at_once()
    except KeyError:
        pass
gc.collect()
after = bridge.stats()
assert after.by("framework")["torch"].total_count - before.by("framework")["torch"].total_count == 1100
assert after.current_count == before.current_count
assert (after.foreign_frees, after.size_mismatches) == (before.foreign_frees, before.size_mismatches)
"""
    )


@pytest.mark.behaviour("M2")
def test_out_of_memory_is_documented_and_nothing_is_lost() -> None:
    run(
        _START
        + """
bridge.install(frameworks=["torch"], maximum_pool_size="256MiB")
kept = torch.ones(1 << 20, device="cuda")
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except RuntimeError as error:
    assert f"rmm_managed_bridge: no {1 << 30} bytes for PyTorch on device 0: out of memory" in str(error), error
    assert f"{4 << 20} bytes live" in str(error), error
else:
    raise AssertionError("allocated")
assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
assert kept.sum().item() == 1 << 20
failure = bridge.history().events[-1]
assert (failure.action, failure.framework, failure.requested_bytes) == ("failure", "torch", 1 << 30)
assert torch.empty(0, device="cuda").numel() == 0 and torch.empty((3, 0), device="cuda").shape == (3, 0)
"""
    )


def test_after_first_use_it_is_a_clear_error_and_a_memory_pool_works() -> None:
    run(
        _START
        + """
theirs = torch.ones(10, device="cuda")
try:
    bridge.install(frameworks=["numpy", "torch"])
except bridge.FrameworkError as error:
    assert "used CUDA memory before" in str(error) and "torch_mempool" in str(error), error
else:
    raise AssertionError("installed")
assert not bridge.status().installed and not bridge.owns(np.ones(10))

bridge.install(maximum_pool_size="256MiB")
assert "cannot be changed back" in bridge.status().frameworks["torch"]
pool = bridge.torch_mempool()
assert bridge.torch_mempool() is pool and isinstance(pool, torch.cuda.MemPool)
with torch.cuda.use_mem_pool(pool):
    ours = torch.full((1 << 20,), 3.0, device="cuda")
    try:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pass
    else:
        raise AssertionError("allocated")
    more = torch.ones(1 << 18, device="cuda")
assert not bridge.owns(torch.ones(10, device="cuda")) and not bridge.owns(theirs)
record = bridge.allocation_of(ours)
assert (record.framework, record.kind) == ("torch", "managed") and record.requested_bytes >= 4 << 20
assert bridge.as_numpy(ours)[77] == 3 and more.sum().item() == 1 << 18
del ours, more
torch.cuda.empty_cache()
"""
    )


@pytest.mark.requires("cupy", "warp")
@pytest.mark.behaviour("I1")
def test_warp_and_torch_share_one_pool_and_one_snapshot() -> None:
    run(
        _START
        + """
import cupy, warp as wp
wp.config.quiet = True
bridge.install(frameworks=["numpy", "cupy", "warp", "torch"])
tensor = torch.arange(1 << 18, dtype=torch.float32, device="cuda")
array = wp.ones(1 << 18, dtype=wp.float32, device="cuda:0")
count = bridge.stats().current_count

as_warp = [wp.from_torch(tensor), bridge.as_warp(tensor)]
assert {each.ptr for each in as_warp} == {tensor.data_ptr()}
as_torch = [wp.to_torch(array), bridge.as_torch(array)]
assert {each.data_ptr() for each in as_torch} == {array.ptr}
assert bridge.stats().current_count == count, "nothing was copied"
as_torch[1] *= 5
assert (bridge.as_numpy(array) == 5).all()
bridge.as_numpy(tensor)[3] = 77
assert bridge.as_torch(bridge.as_warp(tensor))[3].item() == 77

held = bridge.snapshot().by("framework")
assert held["torch"] >= 1 << 20 and held["warp"] >= 1 << 20, held
for x in (tensor, array, *as_warp, *as_torch):
    assert bridge.owns(x) and bridge.memory_kind(x) == "managed" and bridge.can_access("cpu", x)

for made in (np.ones((64, 32), "f4"), cupy.ones((64, 32), "f4")):
    view = bridge.as_torch(made)
    assert view.shape == (64, 32) and view.device.type == "cuda" and bridge.owns(view)
    view.add_(1)
    turned = bridge.as_torch(made.T)
    assert turned.shape == (32, 64) and turned.data_ptr() == view.data_ptr()
    assert (bridge.as_numpy(made) == 2).all()
live = bridge.stats().current_count
view = bridge.as_torch(np.full(1000, 4.0))
gc.collect()
assert bridge.stats().current_count == live + 1 and view.sum().item() == 4000
del view
gc.collect()
assert bridge.stats().current_count == live
assert bridge.as_torch(np.empty((3, 0))).shape == (3, 0)
for wrong in (np.ones(10)[::-1], np.ones(10, ">f4"), np.array([None]), np.ones(3, "V5")):
    try:
        bridge.as_torch(wrong)
    except bridge.ViewError:
        pass
    else:
        raise AssertionError(wrong.dtype)
"""
    )


@pytest.mark.requires("cupy")
@pytest.mark.behaviour("I3")
def test_what_torchs_dlpack_rejects_goes_through_the_array_interface() -> None:
    run(
        _START
        + """
import cupy
bridge.install(frameworks=["cupy", "torch"])
made = cupy.arange(1 << 18, dtype="f4")
try:
    shared = torch.from_dlpack(made)
except (BufferError, RuntimeError, TypeError, ValueError, AssertionError) as error:
    print("DLPack:", error)
else:
    print("DLPack takes managed memory now")
    assert shared.data_ptr() == made.data.ptr
view = bridge.as_torch(made)
assert view.data_ptr() == made.data.ptr and view[77].item() == 77
"""
    )


@pytest.mark.behaviour("G1")
def test_record_stream_keeps_a_block_from_reuse() -> None:
    run(
        _START
        + """
bridge.install(frameworks=["numpy", "torch"])
side = torch.cuda.Stream()
x = torch.full((4 << 20,), 3.0, device="cuda")
result = torch.zeros_like(x)
torch.cuda.synchronize()
with torch.cuda.stream(side):
    torch.cuda._sleep(800_000_000)
    result.copy_(x)
x.record_stream(side)
address = x.data_ptr()
del x
y = torch.full((4 << 20,), 9.0, device="cuda")
z = np.full(4 << 20, 9.0, "f4")
assert address not in (y.data_ptr(), z.ctypes.data)
torch.cuda.synchronize()
assert (result == 3).all().item()
"""
    )


@pytest.mark.behaviour("G1")
def test_streams_threads_and_the_cpu_are_kept_in_order() -> None:
    run(
        _START
        + """
import threading
bridge.install(frameworks=["numpy", "torch"])
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    z = torch.zeros(4 << 20, device="cuda")
    torch.cuda._sleep(400_000_000)
    z.fill_(7)
assert (bridge.as_numpy(z) == 7).all(), "the CPU waits for the stream that the tensor was made on"

with torch.cuda.stream(side):
    torch.cuda._sleep(400_000_000)
    z.fill_(8)
    del z  # its memory is the side stream's until that is done
fresh = [torch.full((4 << 20,), float(i), device="cuda") for i in range(3)]
host = [np.full(4 << 20, float(i), "f4") for i in range(3)]
torch.cuda.synchronize()
assert all((t == i).all().item() and (h == i).all() for i, (t, h) in enumerate(zip(fresh, host)))
del fresh, host

failures = []
def work(seed):
    stream = torch.cuda.Stream()
    for step in range(200):
        value = float(seed * 1000 + step)
        with torch.cuda.stream(stream):
            t = torch.full((1 + (step * 7919) % 100_000,), value, device="cuda") + 1
        if not (bridge.as_numpy(t) == value + 1).all():
            failures.append((seed, step))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert failures == []

weights = torch.randn(512, 512, device="cuda", requires_grad=True)  # its gradient is made on a thread of PyTorch's
(weights @ weights).sum().backward()
assert torch.isfinite(weights.grad).all().item() and bridge.owns(weights.grad)
"""
    )


@pytest.mark.requires("cupy")
@pytest.mark.behaviour("G5")
def test_a_tensor_made_in_a_capture_is_refused_and_the_capture_lives() -> None:
    """The capture is CuPy's; PyTorch works on its stream."""
    run(
        _START
        + """
import cupy
bridge.install(frameworks=["numpy", "torch"])
stream = cupy.cuda.Stream(non_blocking=True)
x = torch.zeros(1000, device="cuda")
gone = torch.zeros(1000, device="cuda")
x.add_(1)
x.zero_()
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
    stream.begin_capture()
    x.add_(1)
    try:
        torch.empty(1000, device="cuda")
    except RuntimeError as error:
        assert "being captured; make tensors before the capture begins" in str(error), error
    else:
        raise AssertionError("allocated")
    del gone
    host = np.ones(1 << 20)
    graph = stream.end_capture()
for _ in range(10):
    graph.launch(stream)
stream.synchronize()
assert (x == 10).all().item()
"""
    )


@pytest.mark.requires("cupy")
@pytest.mark.behaviour("G5")
def test_tensors_over_the_pool_are_made_during_captures() -> None:
    """In all modes, on blocking streams and others, on the thread that captures and on another one."""
    run(
        _START
        + """
import cupy, threading
bridge.install(frameworks=["numpy", "cupy"])
warm = bridge.as_torch(np.ones(10, "f4"))  # PyTorch starts CUDA at its first use, which no capture survives
assert warm.sum().item() == 10
x = cupy.zeros(1000, "f4")
cupy.add(x, 1, out=x)
torch.cuda.synchronize()

def capture(mode, blocking, elsewhere):
    captured = cupy.cuda.Stream(non_blocking=not blocking)
    other = cupy.cuda.Stream(non_blocking=True)
    with captured:
        a = cupy.zeros(1000, "f4")
    with other:
        b = cupy.zeros(1000, "f4")
    captured.synchronize()
    other.synchronize()
    problems = []

    def show():
        try:
            cupy.cuda.Device(0).use()
            with other, torch.cuda.stream(torch.cuda.ExternalStream(other.ptr)):
                host = np.ones(1000, "f4")
                view = bridge.as_torch(host)
                assert view.data_ptr() == host.ctypes.data
                bridge.record_stream(view, other)
                assert bridge.as_numpy(view).ctypes.data == host.ctypes.data
                assert bridge.as_torch(b).data_ptr() == b.data.ptr
                del view, host
                gc.collect()
            with torch.cuda.stream(torch.cuda.ExternalStream(captured.ptr)):
                try:
                    bridge.as_torch(np.ones(1000, "f4"))
                except bridge.BridgeError:
                    pass
                else:
                    raise AssertionError("shown to a captured stream")
        except BaseException as error:
            problems.append(error)

    with captured:
        captured.begin_capture(mode)
        cupy.add(a, 1, out=a)
    if elsewhere:
        thread = threading.Thread(target=show)
        thread.start()
        thread.join()
    else:
        show()
    with captured:
        graph = captured.end_capture()
        graph.launch(captured)
    captured.synchronize()
    assert problems == [], (mode, blocking, elsewhere, problems)
    assert (bridge.as_numpy(a) == 1).all()

for mode in range(3):
    for blocking in (False, True):
        for elsewhere in (False, True):
            capture(mode, blocking, elsewhere)
"""
    )


@pytest.mark.behaviour("G4")
def test_torchs_own_graphs_replay_over_tensors_that_exist() -> None:
    """With a memory pool: PyTorch's graphs keep memory of their own, which its pluggable allocator has not."""
    run(
        _START
        + """
bridge.install(frameworks=["numpy"])
with torch.cuda.use_mem_pool(bridge.torch_mempool()):
    a = torch.zeros(1 << 20, device="cuda")
    b = torch.ones(1 << 20, device="cuda")
torch.cuda.synchronize()
before = bridge.stats().by("framework")["torch"].total_count
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    a.add_(b)
for step in range(10):
    bridge.as_numpy(b)[:] = step
    graph.replay()
    torch.cuda.synchronize()
assert (bridge.as_numpy(a) == sum(range(10))).all()
assert bridge.stats().by("framework")["torch"].total_count == before
"""
    )


def test_uninstall_says_what_it_cannot_undo_and_tensors_go_on() -> None:
    run(
        _START
        + """
import warnings
bridge.install(frameworks=["numpy", "torch"])
old = torch.ones(1000, device="cuda")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    bridge.uninstall()
assert any("PyTorch's allocator cannot be changed back" in str(each.message) for each in caught), caught
del old
gc.collect()
after = torch.ones(1000, device="cuda")
assert bridge.owns(after) and after.sum().item() == 1000
bridge.install(frameworks=["torch"])
new = torch.ones(1000, device="cuda")
assert bridge.allocation_of(new).framework == "torch"
"""
    )


@pytest.mark.requires("warp", "cupy")
def test_memory_pools_of_each_framework_side_by_side_leave_no_block(tmp_path) -> None:
    """Blocks of all four come and go in every order, and the pool ends empty."""
    run(
        _START
        + f"""
import cupy, warp as wp
wp.config.quiet = True
bridge.install(frameworks=["numpy", "cupy", "warp", "torch"])
makers = [
    lambda: np.ones(1 << 18, "f4"),
    lambda: cupy.ones(1 << 18, "f4"),
    lambda: wp.ones(1 << 18, dtype=wp.float32, device="cuda:0"),
    lambda: torch.ones(1 << 18, device="cuda"),
]
orders = {list(itertools.permutations(range(4)))!r}
torch.cuda.synchronize()
gc.collect()
live = bridge.stats().current_count
for order in orders:
    made = [makers[i]() for i in order]
    assert all((bridge.as_numpy(each) == 1).all() for each in made)
    while made:
        made.pop(len(made) // 2)
gc.collect()
assert bridge.stats().current_count == live, bridge.snapshot()
"""
    )
