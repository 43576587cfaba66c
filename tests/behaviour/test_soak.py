"""Everything at once for a while: arrays that grow and shrink, threads, forks, installs, tags and generated code.

What is reserved and resident stays within the bound, and nothing is left at the end. BRIDGE_SOAK_SECONDS=600 is the
long form; CI runs a short one.
"""

import os

from helpers.programs import run_python

SECONDS = float(os.environ.get("BRIDGE_SOAK_SECONDS", "8"))


def test_a_long_program_of_everything_ends_within_the_bound() -> None:
    done = run_python(
        """
        import os
        import random
        import sys
        import threading
        import time

        import numpy as np

        import rmm_managed_bridge as bridge

        MIB = 1 << 20
        seconds = float(sys.argv[1])
        random.seed(7)

        def resident_bytes():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        def grow(most):
            array, piece = np.zeros(0, "u1"), np.ones(random.randrange(1, 4 * MIB), "u1")
            while array.nbytes < most:
                joined = random.random() < 0.7
                array = np.concatenate([array, piece]) if joined else np.resize(array, array.nbytes + MIB)
            return array[: most // 2].copy()

        def fork():
            child = os.fork()
            if child == 0:
                bridge.status()
                os._exit(0 if np.ones(1000).sum() == 1000 else 1)
            assert os.waitpid(child, 0)[1] == 0

        def many_small():
            kept = []
            for number in range(2000):
                with bridge.tag(f"kind {number % 50}"):
                    kept.append(np.empty(random.randrange(1, 40_000)))
                if len(kept) > 200:
                    kept.pop(random.randrange(len(kept)))

        def generated():
            for number in range(50):
                names = {"np": np}
                exec(f"def made():\\n    return np.empty({number + 1})", names)
                names["made"]()

        def in_threads():
            threads = [threading.Thread(target=act) for act in (many_small, many_small, generated)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def grow_some():
            grow(random.choice([3, 40, 90]) * MIB)

        actions = [grow_some, fork, many_small, generated, in_threads, bridge.stats]

        def one_install(until):
            with bridge.installed("host"):
                with bridge.peak_scope() as peak:
                    while time.monotonic() < until:
                        random.choice(actions)()
                        reserved = bridge.stats().reserved_bytes
                        assert reserved <= 2 * peak.peak_bytes + 128 * MIB, (reserved, peak.peak_bytes)

        begun = time.monotonic()
        one_install(begun + seconds / 10)
        after_first = resident_bytes()
        while time.monotonic() < begun + seconds:
            one_install(time.monotonic() + seconds / 10)
        for _ in range(500):
            if not bridge.stats().pools:
                break
            time.sleep(0.02)
        assert bridge.stats().current_bytes == bridge.stats().reserved_bytes == 0
        grown = resident_bytes() - after_first
        assert grown < 64 * MIB, f"{grown / MIB:.0f} MiB more at the end"
        print("ended")
        """,
        SECONDS,
        timeout=SECONDS + 120,
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr[-3000:]
