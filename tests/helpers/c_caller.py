"""A compiled caller of NumPy's handler with no Python frame: a thread that C made."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

_SOURCE = r"""
#include <pthread.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

struct call {
  void* (*allocate)(void*, size_t);
  void* context;
  size_t bytes;
  void* result;
  long thread;
};

static void* body(void* argument) {
  struct call* call = argument;
  call->thread = syscall(SYS_gettid);
  call->result = call->allocate(call->context, call->bytes);
  return NULL;
}

int allocate_in_thread(struct call* call) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, body, call) != 0) return -1;
  return pthread_join(thread, NULL);
}
"""


class _Call(ctypes.Structure):
    _fields_ = [
        ("allocate", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("result", ctypes.c_void_p),
        ("thread", ctypes.c_long),
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


class CThread:
    """Calls the functions of a handler's capsule from C."""

    def __init__(self, capsule: Any, folder: Path) -> None:
        source = folder / "c_thread.c"
        source.write_text(_SOURCE)
        library = folder / "c_thread.so"
        compiler = shutil.which("gcc") or shutil.which("g++")
        command = [compiler, "-x", "c", "-shared", "-fPIC", "-pthread", "-o", library, source]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        self._library = ctypes.CDLL(str(library))
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self._handler = _Handler.from_address(get_pointer(capsule, b"mem_handler"))
        assert self._handler.name == b"rmm_managed_bridge"

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        """Return the address that malloc gave in the new thread, and the thread's native id."""
        call = _Call(self._handler.malloc, self._handler.context, size_bytes)
        assert self._library.allocate_in_thread(ctypes.byref(call)) == 0
        return int(call.result or 0), int(call.thread)

    def free(self, ptr: int, size_bytes: int) -> None:
        """Free without the GIL, on this thread."""
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(self._handler.free)
        free(self._handler.context, ptr, size_bytes)
