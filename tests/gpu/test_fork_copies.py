"""What a forked child finds of real managed memory: L8. Each in a process of its own, which may be killed."""

import pytest
from helpers.programs import run_on_gpu

pytestmark = [pytest.mark.requires("gpu"), pytest.mark.requires("cupy")]

START = """
import ctypes, multiprocessing, os, signal, sys, warnings
import cupy as cp, numpy as np
import rmm_managed_bridge as bridge

MIB = 1 << 20
warnings.filterwarnings("error", category=bridge.BridgeWarning)
bridge.install("managed", initial_pool_size="256MiB", maximum_pool_size="512MiB", frameworks=["numpy", "cupy"])


def in_child(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            work()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ends_well(*children):
    states = [os.waitpid(child, 0)[1] for child in children]
    assert states == [0] * len(children), states


def is_arange(x, first=0):
    assert int(x[0]) == first and (x[1:] == np.arange(1, x.size)).all()
"""


def run(program: str) -> None:
    run_on_gpu(START + program)


@pytest.mark.behaviour("L8")
def test_a_child_reads_writes_resizes_and_drops_arrays() -> None:
    run("""
x, small = np.arange(8 * MIB), [np.full(100, n) for n in range(1000)]
assert bridge.memory_kind(x) == "managed"


def work():
    global x
    is_arange(x)
    assert all((each == n).all() for n, each in enumerate(small))
    x[0] = 5
    ends_well(in_child(lambda: is_arange(x, 5)))
    small[7].resize(100_000, refcheck=False)
    assert (small[7][:100] == 7).all()
    x.resize(9 * MIB, refcheck=False)
    is_arange(x[: 8 * MIB], 5)
    assert not bridge.owns(x)
    del x
    small.clear()


ends_well(in_child(work))
is_arange(x)
x += 1
assert int(cp.asarray(bridge.as_cupy(x)).sum()) == int(x.sum())
ends_well(in_child(lambda: (x - 1)[0] == 0 or os._exit(2)))
assert bridge.stats().fork_count == 2
""")


@pytest.mark.behaviour("L8")
def test_arrays_of_the_device_are_there_where_the_cpu_was_shown_them() -> None:
    run("""
shown, hidden = cp.arange(8 * MIB), cp.arange(MIB)
view = bridge.as_numpy(shown)
shown *= 3  # after the view: the fork waits for it
cp.cuda.Device().synchronize()


def work():
    assert (view == 3 * np.arange(8 * MIB)).all()
    for lost in (hidden.data.ptr, hidden.data.ptr + 1000):
        try:
            bridge.allocation_of(lost)
        except bridge.BridgeError as error:
            assert "not copied for it" in str(error)
        else:
            raise AssertionError("it is not there")


ends_well(in_child(work))
assert int(shown[-1]) == 3 * (8 * MIB - 1)
""")


@pytest.mark.behaviour("L8")
def test_memory_on_the_device_stays_there() -> None:
    """By the pages that the CPU has mapped, which are none while they lie on the device."""
    run("""
def resident_bytes(x):
    low, high, total, inside = x.ctypes.data, x.ctypes.data + x.nbytes, 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            inside = first < high and last > low
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


x = np.arange(16 * MIB)
on_cpu = resident_bytes(x)
device = bridge.as_cupy(x)
bridge.prefetch(x, 0)
device += 0
cp.cuda.Device().synchronize()
on_device = resident_bytes(x)
print("mapped by the CPU:", on_cpu, "and on the device:", on_device)
if on_cpu >= x.nbytes > 2 * on_device:  # else the kernel does not count them
    ends_well(in_child(lambda: is_arange(x)))
    assert resident_bytes(x) <= on_device + MIB, resident_bytes(x)
    ends_well(in_child(lambda: is_arange(x)))
    assert resident_bytes(x) <= on_device + MIB, resident_bytes(x)
else:
    ends_well(in_child(lambda: is_arange(x)))
""")


@pytest.mark.behaviour("L8")
def test_a_capture_lives_through_a_fork_and_what_it_uses_is_left_out() -> None:
    run("""
x, other = np.arange(MIB, dtype="f4"), np.arange(MIB)
stream = cp.cuda.Stream(non_blocking=True)
with stream:
    device = bridge.as_cupy(x)
    device += 1  # compiles the kernel
stream.synchronize()
with stream:
    stream.begin_capture()
    device += 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", bridge.BridgeWarning)
        ends_well(in_child(lambda: is_arange(other)))
    graph = stream.end_capture()
graph.launch(stream)
stream.synchronize()
(text,) = [str(each.message) for each in said if issubclass(each.category, bridge.BridgeWarning)]
assert "is being captured" in text, text
assert float(bridge.as_numpy(x)[5]) == 7
""")


@pytest.mark.behaviour("L8")
def test_eight_children_take_little_more_than_one_copy() -> None:
    run("""
x = np.arange(64 * MIB, dtype="i4")
reading, writing = os.pipe()
done_reading, done = os.pipe()


def pss(process):
    lines = open(f"/proc/{process}/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))


def work():
    assert int(x.sum(dtype="i8")) == x.size * (x.size - 1) // 2
    os.write(done, b"x")
    os.read(reading, 1)


before = pss("self")
children = [in_child(work) for _ in range(8)]
for _ in children:
    os.read(done_reading, 1)
more = pss("self") - before + sum(map(pss, children))
os.write(writing, b"x" * 8)
ends_well(*children)
print("eight children of", x.nbytes, "bytes take", more)
# A copy for each child would be eight times as much. What each writes of its interpreter is in it.
assert 0.9 * x.nbytes <= more < 1.5 * x.nbytes + 8 * 32 * MIB, more
stats = bridge.stats()
assert stats.fork_count == 8 and x.nbytes <= stats.fork_copied_bytes < 1.1 * x.nbytes, stats.fork_copied_bytes
""")


@pytest.mark.behaviour("L9")
def test_a_hundred_forks_under_load() -> None:
    run("""
import threading

x, stop = np.arange(MIB), threading.Event()


def load():
    with cp.cuda.Stream(non_blocking=True):
        while not stop.is_set():
            mine = np.ones(MIB // 4)
            bridge.as_cupy(mine).sum()
            cp.ones(MIB).sum()
            cp.cuda.get_current_stream().synchronize()


threads = [threading.Thread(target=load) for _ in range(3)]
for thread in threads:
    thread.start()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", bridge.BridgeWarning)  # of the threads' own arrays, whose work may go on
    for _ in range(100):
        ends_well(in_child(lambda: is_arange(x)))
stop.set()
for thread in threads:
    thread.join()
""")


@pytest.mark.behaviour("L8")
def test_a_pool_of_workers_and_a_preloaded_server() -> None:
    run("""
import socket

table = np.arange(4 * MIB)


def total(part):
    return int(table[part::4].sum())


with multiprocessing.get_context("fork").Pool(4) as pool:
    assert sum(pool.map(total, range(4))) == table.size * (table.size - 1) // 2

# As gunicorn with --preload: the parent listens, its children answer with what it had loaded.
server = socket.create_server(("127.0.0.1", 0))


def serve():
    for _ in range(3):
        connection, _ = server.accept()
        with connection:
            index = int(connection.recv(100))
            connection.sendall(b"%d" % int(table[index]))


workers = [in_child(serve) for _ in range(2)]
for index in range(6):
    with socket.create_connection(server.getsockname()) as connection:
        connection.sendall(b"%d" % index)
        assert int(connection.recv(100)) == index
ends_well(*workers)
""")


@pytest.mark.requires("torch")
@pytest.mark.behaviour("L8")
def test_a_data_loader_with_two_forked_workers() -> None:
    run("""
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self):
        self.rows = np.arange(MIB, dtype="f4").reshape(-1, 256)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.tensor(self.rows[index])


rows = Rows()
assert bridge.memory_kind(rows.rows) == "managed"
for epoch in range(2):
    loader = DataLoader(rows, batch_size=64, num_workers=2, multiprocessing_context="fork")
    total = sum(float(batch.to("cuda").sum(dtype=torch.float64)) for batch in loader)
    assert total == MIB * (MIB - 1) / 2, total
""")
