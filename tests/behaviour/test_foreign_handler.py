"""A NumPy handler of somebody else's keeps the arrays of its context out of the pool, and that is said."""

import contextvars
import ctypes
import pickle
from collections.abc import Iterator
from copy import copy, deepcopy

import numpy as np
import pytest

import rmm_managed_bridge as bridge
from rmm_managed_bridge._native import numpy_handler

pytestmark = pytest.mark.behaviour("U1")


_kept: list[object] = []  # NumPy frees by it what is still alive
P, SIZE = ctypes.c_void_p, ctypes.c_size_t


class Handler(ctypes.Structure):
    """`PyDataMem_Handler` of NumPy's C API."""

    _fields_ = [
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", P),
        *((name, P) for name in ("malloc", "calloc", "realloc", "free")),
    ]


def handler_of_the_c_library() -> object:
    library = ctypes.CDLL(None)
    library.malloc.argtypes, library.calloc.argtypes = [SIZE], [SIZE, SIZE]
    library.realloc.argtypes, library.free.argtypes = [P, SIZE], [P]
    library.malloc.restype = library.calloc.restype = library.realloc.restype = P
    functions = [
        ctypes.CFUNCTYPE(P, P, SIZE)(lambda context, size: library.malloc(size)),
        ctypes.CFUNCTYPE(P, P, SIZE, SIZE)(lambda context, count, size: library.calloc(count, size)),
        ctypes.CFUNCTYPE(P, P, P, SIZE)(lambda context, ptr, size: library.realloc(ptr, size)),
        ctypes.CFUNCTYPE(None, P, P, SIZE)(lambda context, ptr, size: library.free(ptr)),
    ]
    handler = Handler(b"somebody_else", 1, None, *(ctypes.cast(each, P) for each in functions))
    name = ctypes.create_string_buffer(b"mem_handler")
    _kept.extend((functions, handler, name))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [P, P, P]
    return new(ctypes.addressof(handler), ctypes.addressof(name), None)


@pytest.fixture
def somebody_else() -> Iterator[None]:
    """Give this context a handler that another library made."""
    before = numpy_handler.set_current(handler_of_the_c_library())
    yield
    numpy_handler.set_current(before)


def test_install_warns_once_with_the_handlers_name(somebody_else: None) -> None:
    with pytest.warns(bridge.BridgeWarning, match="'somebody_else', a handler that somebody else set") as said:
        bridge.install("host")
    assert len(said) == 1
    try:
        array = np.ones(1000)
        assert bridge.allocation_of(array) is None
        assert any("'somebody_else'" in note for note in bridge.status().notes)
        assert "'somebody_else'" in str(bridge.status())
        assert contextvars.Context().run(bridge.status).notes == (), "another context has the bridge's"
        bridge.install("host")  # and is quiet about what it has said
    finally:
        bridge.uninstall()


def test_scope_context_takes_its_place(somebody_else: None) -> None:
    with bridge.installed("host", numpy_scope="context"):
        assert bridge.owns(np.ones(1000)) and bridge.status().notes == ()
    assert bridge.status().notes == ()


def test_what_is_installed_travels_as_its_status() -> None:
    with bridge.installed("host") as installed:
        arrived = pickle.loads(pickle.dumps(installed))
        assert isinstance(arrived, bridge.Status)
        assert (arrived.installed, arrived.backend) == (True, "host")
        assert copy(installed) is installed is deepcopy(installed)
