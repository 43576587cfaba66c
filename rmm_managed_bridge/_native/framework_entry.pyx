# distutils: language = c++
"""The native entry points for CuPy. See framework_entry.hpp."""

from cpython.pycapsule cimport PyCapsule_GetName, PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF, PyObject
from libc.stddef cimport size_t
from libc.stdint cimport intptr_t, uint8_t, uintptr_t

from rmm_managed_bridge._native cimport core
from rmm_managed_bridge._native.core cimport CHeap, CProcess, Origin, Refusal


cdef extern from "framework_entry.hpp" namespace "rmm_bridge" nogil:
    const int kDevices

    cdef cppclass AtomicHeap "std::atomic<rmm_bridge::Heap*>":
        void store(CHeap* heap)
        CHeap* load()

    cdef cppclass CCupyGuest "rmm_bridge::CupyGuest":
        CProcess* process
        Origin* origin
        uint8_t framework
        AtomicHeap heaps[64]
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


cdef class CupyGuest:
    """What CuPy's `CFunctionAllocator` is made from: the addresses of `param`, `malloc` and `free`."""

    cdef CCupyGuest* guest

    def __cinit__(self, ask_stream, hold_stream, refuse):
        # Never deleted: CuPy's blocks point at it.
        self.guest = new CCupyGuest()
        self.guest.process = core.process
        self.guest.origin = core.origin
        self.guest.framework = core.framework_number("cupy")
        for callable_ in (ask_stream, hold_stream, refuse):
            Py_INCREF(callable_)
        self.guest.ask_stream = <PyObject*>ask_stream
        self.guest.hold_stream = <PyObject*>hold_stream
        self.guest.refuse = <PyObject*>refuse

    def use_stream_function(self, capsule):
        """Take CuPy's native "current stream" if its signature is the one we know. Return True if so."""
        cdef const char* signature = PyCapsule_GetName(capsule)
        if <bytes>signature not in _STREAM_SIGNATURES:
            return False
        self.guest.current_stream = <intptr_t (*)() noexcept nogil>PyCapsule_GetPointer(capsule, signature)
        return True

    def tell(self, hint):
        """Call ``hint(ptr, size_bytes, stream)`` for each new block that a hint policy may want placed. Once."""
        Py_INCREF(hint)
        self.guest.hint = <PyObject*>hint

    def use(self, int device, core.Heap heap):
        """Blocks for `device` come from `heap`; with None, requests fail with CuPy's out-of-memory error."""
        if not 0 <= device < kDevices:
            raise ValueError(f"device {device} is not between 0 and {kDevices - 1}")
        self.guest.heaps[device].store(<CHeap*>NULL if heap is None else heap.c_heap)

    def serves(self, int device):
        """Return True if a heap that takes requests stands behind `device`."""
        if not 0 <= device < kDevices:
            return False
        cdef CHeap* heap = self.guest.heaps[device].load()
        return heap != NULL and not heap.retired()

    def malloc(self, size_t size_bytes, int device):
        """Call the entry point as CuPy would, for tests."""
        return <uintptr_t>bridge_cupy_malloc(self.guest, size_bytes, device)

    def free(self, uintptr_t ptr, int device):
        """Call the entry point as CuPy would, for tests."""
        bridge_cupy_free(self.guest, <void*>ptr, device)

    @property
    def addresses(self):
        """Return (param, malloc, free)."""
        return <intptr_t>self.guest, <intptr_t>&bridge_cupy_malloc, <intptr_t>&bridge_cupy_free


def failure_of(core.Heap heap, int refusal, size_t requested_bytes, uintptr_t stream):
    """Return the exception for an allocation that the entry point was refused."""
    return core.failure(heap.c_heap, <Refusal>refusal, requested_bytes, stream)
