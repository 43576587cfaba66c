"""A program that names each of its requests: tags have an end, and it is said."""

from helpers.programs import run_python


def test_names_beyond_the_last_count_together_and_go_on_nesting() -> None:
    done = run_python(
        """
        import tracemalloc
        import warnings

        import numpy as np

        import rmm_managed_bridge as bridge

        def tag_of_one():
            return bridge.allocation_of(np.empty(5000)).tag

        with bridge.installed("host"), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with bridge.tag("kept"):
                pass
            for number in range(1 << 16):
                with bridge.tag(f"request {number}"):
                    pass
            assert len(said) == 1, said
            assert "name kinds of work" in str(said[0].message)
            assert said[0].filename == __file__
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for number in range(3000):
                with bridge.tag(f"later {number}"), bridge.tag("inside"):
                    assert tag_of_one() == "(other tags)"
            assert tracemalloc.get_traced_memory()[0] - before < 100_000
            with bridge.tag("kept"):
                assert tag_of_one() == "kept"
                with bridge.tag("new"):
                    assert tag_of_one() == "kept/(other tags)"
                assert tag_of_one() == "kept"
            assert tag_of_one() == ""
            with bridge.tag("limited", limit="1MiB"):
                assert tag_of_one() == "limited"
                with bridge.tag("new"):
                    try:
                        np.empty(2 << 20)
                    except MemoryError:
                        print("limited")
        """
    )
    assert (done.returncode, done.stdout) == (0, "limited\n"), done.stderr
