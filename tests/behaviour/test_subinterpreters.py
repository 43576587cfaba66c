"""Beside other interpreters of the process: the bridge is in one, and works on there."""

import pytest
from helpers.programs import must_succeed, run_python


@pytest.mark.behaviour("L1")
def test_another_interpreter_is_refused_and_the_pool_works_on_with_and_without_the_gil() -> None:
    must_succeed(
        run_python(
            """
            import concurrent.futures, ctypes, sys
            import numpy as np
            import rmm_managed_bridge as bridge
            from rmm_managed_bridge._native import numpy_handler

            if sys.version_info >= (3, 13):
                import _interpreters as interpreters
            else:
                import _xxsubinterpreters as interpreters

            bridge.install("host")
            number = interpreters.create()
            try:
                # From 3.13 on what an interpreter raised is returned.
                failed = interpreters.run_string(number, "import rmm_managed_bridge")
            except interpreters.RunFailedError as error:
                failed = error
            assert "ImportError" in str(failed), failed
            interpreters.destroy(number)

            get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
            get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            handler = get_pointer(numpy_handler.current(), b"mem_handler")
            context, malloc, _, _, free = (ctypes.c_void_p.from_address(handler + 128 + 8 * i).value for i in range(5))
            malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(malloc)
            free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(free)


            def grow(turn):
                ptr = malloc(context, 200 << 20)  # ctypes lets go of the GIL
                free(context, ptr, 200 << 20)
                assert ptr and bridge.owns(np.ones(64 << 17))


            with concurrent.futures.ThreadPoolExecutor(3) as threads:
                list(threads.map(grow, range(6)))
            assert bridge.stats().current_count == 0 and bridge.trim() >= 0
            """
        )
    )
