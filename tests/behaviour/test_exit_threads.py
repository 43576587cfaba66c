"""Daemon threads that are in the pool when the program ends, and the ends of forked children: L1, L8."""

import subprocess

import pytest
from helpers.programs import must_succeed, run_python

# A library whose end takes a while, as CUDA's does: a thread that asks for the GIL meanwhile finds no interpreter.
SLOW_END = "#include <unistd.h>\n__attribute__((destructor)) static void end(void) { usleep(900000); }\n"


@pytest.fixture(scope="module")
def slow_end(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("slow_end")
    (folder / "slow_end.c").write_text(SLOW_END)
    library = str(folder / "libslow_end.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(folder / "slow_end.c")], check=True)
    return library


@pytest.mark.behaviour("L1")
@pytest.mark.parametrize("where", ["on_oom", "upstream"])
def test_a_daemon_thread_that_waits_in_python_below_the_pool_ends_quietly(where: str, slow_end: str) -> None:
    must_succeed(
        run_python(
            """
            import ctypes, sys, threading, time
            import numpy as np
            import rmm
            import rmm_managed_bridge as bridge
            from helpers.programs import HostMemory

            inside = threading.Event()


            def nap(*_):
                inside.set()
                time.sleep(0.3)
                return False


            def in_on_oom():
                bridge.install("host", maximum_pool_size="8MiB", on_oom=nap)
                threading.Thread(target=lambda: np.ones(1 << 30, "u1"), daemon=True).start()


            def in_an_upstream():
                def allocate(size, stream):
                    nap()
                    raise MemoryError

                memory = rmm.mr.CallbackMemoryResource(allocate, lambda *_: None)
                resource = bridge.ManagedBridgeResource(memory)
                threading.Thread(target=lambda: resource.allocate(1 << 20), daemon=True).start()


            in_on_oom() if sys.argv[1] == "on_oom" else in_an_upstream()
            assert inside.wait(20)
            slow = ctypes.CDLL(sys.argv[2])
            """,
            where,
            slow_end,
        )
    )


@pytest.mark.behaviour("L8")
@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_child_ends_at_once_whatever_the_parents_thread_was_doing(end: str) -> None:
    """The parent's thread gives memory back for 20 s: whoever waits for it in the child waits for nobody."""
    out = must_succeed(
        run_python(
            """
            import ctypes, os, signal, sys, threading, time
            import rmm
            import rmm_managed_bridge as bridge
            from helpers.programs import HostMemory

            busy = threading.Event()
            usleep = ctypes.CDLL(None).usleep
            memory = HostMemory()


            def give_back(ptr, size, stream):
                if threading.current_thread() is not threading.main_thread():
                    busy.set()
                    usleep(20_000_000)


            slow = rmm.mr.CallbackMemoryResource(
                lambda size, stream: memory.resource.allocate(size), give_back
            )
            resource = bridge.ManagedBridgeResource(slow, release_threshold=0)
            resource.deallocate(resource.allocate(1 << 20), 1 << 20)
            assert busy.wait(20)
            child = os.fork()
            if child == 0:
                eval(sys.argv[1])
            begin = time.monotonic()
            while os.waitpid(child, os.WNOHANG)[0] == 0:
                assert time.monotonic() - begin < 4, "it waits for a thread that it has not"
                time.sleep(0.01)
            print("ended", flush=True)
            os._exit(0)
            """,
            end,
            options=("-W", "error", "-W", "ignore:This process:DeprecationWarning"),
        )
    )
    assert out == "ended\n"
