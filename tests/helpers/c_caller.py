"""A compiled caller of entry points: from a thread that C made, with no Python frame, or with an exception pending."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

_SOURCE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

struct call {
  void* (*allocate)(void*, size_t);
  void* context;
  size_t bytes;
  void* result;
  long thread;
  const char* name;
};

static void* body(void* argument) {
  struct call* call = argument;
  call->thread = syscall(SYS_gettid);
  if (call->name != NULL) pthread_setname_np(pthread_self(), call->name);
  call->result = call->allocate(call->context, call->bytes);
  return NULL;
}

int allocate_in_thread(struct call* call) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, body, call) != 0) return -1;
  return pthread_join(thread, NULL);
}

// Of the interpreter that loads this; its headers may not be there.
extern void* PyExc_KeyError;
extern void PyErr_SetString(void*, const char*);

// What CuPy's native "current stream" gives: a Python function would lose the exception.
intptr_t some_stream(void) { return 0x5000; }

// As a destructor may while an exception is on its way. `device`: of CuPy's function, which takes one; -1 for NumPy's.
void allocate_with_error_set(struct call* call, int device) {
  PyErr_SetString(PyExc_KeyError, "on its way");
  if (device < 0) {
    call->result = call->allocate(call->context, call->bytes);
  } else {
    call->result = ((void* (*)(void*, size_t, int))call->allocate)(call->context, call->bytes, device);
  }
}
"""


class _Call(ctypes.Structure):
    _fields_ = [
        ("allocate", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("result", ctypes.c_void_p),
        ("thread", ctypes.c_long),
        ("name", ctypes.c_char_p),
    ]


class _Handler(ctypes.Structure):
    """`PyDataMem_Handler` of NumPy's C API (NEP 49)."""

    _fields_ = [
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", ctypes.c_void_p),
        ("malloc", ctypes.c_void_p),
        ("calloc", ctypes.c_void_p),
        ("realloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    ]


def why_not() -> str | None:
    """Return why the library cannot be built here, or None."""
    return None if shutil.which("gcc") or shutil.which("g++") else "no C compiler"


def _build(folder: Path) -> str:
    library = folder / "c_thread.so"
    if library.exists():  # and may be loaded
        return str(library)
    source = folder / "c_thread.c"
    source.write_text(_SOURCE)
    compiler = shutil.which("gcc") or shutil.which("g++")
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-pthread", "-o", library, source]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return str(library)


def functions_of(capsule: Any) -> _Handler:
    """Return what a capsule of the bridge's handler holds."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    handler = _Handler.from_address(get_pointer(capsule, b"mem_handler"))
    assert handler.name == b"rmm_managed_bridge"
    return handler


def allocate_with_error_set(
    folder: Path, malloc: int, context: int, size_bytes: int, device: int = -1
) -> tuple[int, Exception | None]:
    """Call a malloc with the GIL held and a KeyError pending. Return its result, and what is pending after."""
    call = _Call(malloc, context, size_bytes)
    try:
        ctypes.PyDLL(_build(folder)).allocate_with_error_set(ctypes.byref(call), device)
    except Exception as error:
        return int(call.result or 0), error
    return int(call.result or 0), None


def stream_function(folder: Path, signature: bytes) -> Any:
    """Return a capsule of a native function that stands for CuPy's "current stream"."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    function = ctypes.PyDLL(_build(folder)).some_stream
    _kept.append(signature)  # the capsule has its address
    return new(ctypes.cast(function, ctypes.c_void_p), signature, None)


_kept: list[object] = []


class CThread:
    """Calls the functions of a handler's capsule from C."""

    def __init__(self, capsule: Any, folder: Path) -> None:
        self._library = ctypes.CDLL(_build(folder))
        self._handler = functions_of(capsule)

    def allocate(self, size_bytes: int, name: str | None = None) -> tuple[int, int]:
        """Return the address that malloc gave in the new thread, and the thread's native id."""
        call = _Call(self._handler.malloc, self._handler.context, size_bytes)
        call.name = None if name is None else name.encode()
        assert self._library.allocate_in_thread(ctypes.byref(call)) == 0
        return int(call.result or 0), int(call.thread)

    def free(self, ptr: int, size_bytes: int) -> None:
        """Free without the GIL, on this thread."""
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(self._handler.free)
        free(self._handler.context, ptr, size_bytes)
