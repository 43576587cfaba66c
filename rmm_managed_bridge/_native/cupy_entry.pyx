# distutils: language = c++
"""The native entry points for CuPy. See cupy.hpp."""

from cpython.pycapsule cimport PyCapsule_GetName, PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF, PyObject
from libc.stddef cimport size_t
from libc.stdint cimport intptr_t, uint8_t, uintptr_t

from rmm_managed_bridge._native.pool cimport Pool, serves, use
from rmm_managed_bridge._native.process cimport CProcess, DevicePools, Origin, framework_number, origin, process


cdef extern from "entry/cupy.hpp" namespace "rmm_bridge" nogil:
    cdef cppclass CCupyState "rmm_bridge::CupyState":
        CProcess* process
        Origin* origin
        uint8_t framework
        DevicePools pools
        intptr_t (*current_stream)() noexcept
        PyObject* ask_stream
        PyObject* hold_stream
        PyObject* refuse
        PyObject* hint

    void* bridge_cupy_malloc "bridge_cupy_malloc"(void* param, size_t size_bytes, int device) except + with gil
    void bridge_cupy_free "bridge_cupy_free"(void* param, void* ptr, int device) noexcept with gil


# As CuPy declares `cdef intptr_t get_current_stream_ptr()` since version 13: a private function, so anything else than
# exactly this is not called.
_STREAM_SIGNATURES = (b"intptr_t (void)",)


cdef class CupyEntry:
    """What CuPy's `CFunctionAllocator` is made from: the addresses of `param`, `malloc` and `free`."""

    cdef CCupyState* state

    def __cinit__(self, ask_stream, hold_stream, refuse):
        # Never deleted: CuPy's blocks point at it.
        self.state = new CCupyState()
        self.state.process = process
        self.state.origin = origin
        self.state.framework = framework_number("cupy")
        for callable_ in (ask_stream, hold_stream, refuse):
            Py_INCREF(callable_)
        self.state.ask_stream = <PyObject*>ask_stream
        self.state.hold_stream = <PyObject*>hold_stream
        self.state.refuse = <PyObject*>refuse

    def use_stream_function(self, capsule):
        """Take CuPy's native "current stream" if its signature is the one we know. Return True if so."""
        cdef const char* signature = PyCapsule_GetName(capsule)
        if <bytes>signature not in _STREAM_SIGNATURES:
            return False
        self.state.current_stream = <intptr_t (*)() noexcept nogil>PyCapsule_GetPointer(capsule, signature)
        return True

    def tell(self, hint):
        """Call ``hint(ptr, size_bytes, stream)`` for each new block that a hint policy may want placed. Once."""
        Py_INCREF(hint)
        self.state.hint = <PyObject*>hint

    def use(self, int device, Pool pool):
        """Blocks for `device` come from `pool`; with None, requests fail with CuPy's out-of-memory error."""
        use(self.state.pools, device, pool)

    def serves(self, int device):
        """Return True if a pool that takes requests stands behind `device`."""
        return serves(self.state.pools, device)

    def malloc(self, size_t size_bytes, int device):
        """Call the entry point as CuPy would, for tests."""
        return <uintptr_t>bridge_cupy_malloc(self.state, size_bytes, device)

    def free(self, uintptr_t ptr, int device):
        """Call the entry point as CuPy would, for tests."""
        bridge_cupy_free(self.state, <void*>ptr, device)

    @property
    def addresses(self):
        """Return (param, malloc, free)."""
        return <intptr_t>self.state, <intptr_t>&bridge_cupy_malloc, <intptr_t>&bridge_cupy_free
