# distutils: language = c++
"""The native entry points for CuPy and PyTorch. See frameworks.hpp."""

from cpython.pycapsule cimport PyCapsule_GetName, PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF, PyObject
from libc.stddef cimport size_t
from libc.stdint cimport intptr_t, uint8_t, uintptr_t

from rmm_managed_bridge._native cimport core
from rmm_managed_bridge._native.core cimport CHeap, CProcess, CUstream, Origin, Refusal


cdef extern from "entry/device_pools.hpp" namespace "rmm_bridge" nogil:
    const int kDevices

    cdef cppclass AtomicHeap "std::atomic<rmm_bridge::Heap*>":
        void store(CHeap* heap)
        CHeap* load()

    cdef cppclass DeviceHeaps:
        AtomicHeap& operator[](size_t device)


cdef extern from "entry/cupy.hpp" namespace "rmm_bridge" nogil:
    cdef cppclass CCupyGuest "rmm_bridge::CupyGuest":
        CProcess* process
        Origin* origin
        uint8_t framework
        DeviceHeaps heaps
        intptr_t (*current_stream)() noexcept
        PyObject* ask_stream
        PyObject* hold_stream
        PyObject* refuse
        PyObject* hint

    void* bridge_cupy_malloc "bridge_cupy_malloc"(void* param, size_t size_bytes, int device) except + with gil
    void bridge_cupy_free "bridge_cupy_free"(void* param, void* ptr, int device) noexcept with gil


cdef extern from "entry/torch.hpp" namespace "rmm_bridge" nogil:
    cdef cppclass CTorchGuest "rmm_bridge::TorchGuest":
        CProcess* process
        Origin* origin
        uint8_t framework
        DeviceHeaps heaps
        PyObject* hold_stream

    CTorchGuest& torch_guest()

    void* bridge_torch_malloc "bridge_torch_malloc"(size_t size_bytes, int device, CUstream stream) except +
    void* bridge_torch_pool_malloc "bridge_torch_pool_malloc"(size_t size_bytes, int device, CUstream stream) except +
    void bridge_torch_free "bridge_torch_free"(void* ptr, size_t size_bytes, int device, CUstream stream)
    void bridge_torch_record_stream "bridge_torch_record_stream"(void* ptr, CUstream stream)

# As CuPy declares `cdef intptr_t get_current_stream_ptr()` since version 13: a private function, so anything else than
# exactly this is not called.
_STREAM_SIGNATURES = (b"intptr_t (void)",)


cdef int _use(DeviceHeaps& heaps, int device, core.Heap heap) except -1:
    if not 0 <= device < kDevices:
        raise ValueError(f"device {device} is not between 0 and {kDevices - 1}")
    heaps[device].store(<CHeap*>NULL if heap is None else heap.c_heap)
    return 0


cdef bint _serves(DeviceHeaps& heaps, int device) noexcept:
    if not 0 <= device < kDevices:
        return False
    cdef CHeap* heap = heaps[device].load()
    return heap != NULL and not heap.retired()


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
        _use(self.guest.heaps, device, heap)

    def serves(self, int device):
        """Return True if a heap that takes requests stands behind `device`."""
        return _serves(self.guest.heaps, device)

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


cdef class TorchGuest:
    """PyTorch's entry points: all objects stand for the one guest of this process, and the newest one's function counts.

    ``hold_stream(handle, device)`` is called from the interpreter's main loop, soon after a block was made on a stream
    that the bridge does not hold.
    """

    def __cinit__(self, hold_stream):
        guest = &torch_guest()
        guest.process = core.process
        guest.origin = core.origin
        guest.framework = core.framework_number("torch")
        Py_INCREF(hold_stream)  # never let go: a call may be on its way
        guest.hold_stream = <PyObject*>hold_stream

    def use(self, int device, core.Heap heap):
        """Blocks for `device` come from `heap`; with None, requests fail."""
        _use(torch_guest().heaps, device, heap)

    def serves(self, int device):
        """Return True if a heap that takes requests stands behind `device`."""
        return _serves(torch_guest().heaps, device)

    @property
    def record_stream_address(self):
        """Return the address of the function for ``Tensor.record_stream``."""
        return <uintptr_t>&bridge_torch_record_stream

    def malloc(self, size_t size_bytes, int device, uintptr_t stream, *, bint pool=False):
        """Call an entry point as PyTorch would, without the GIL, for tests."""
        cdef void* ptr
        with nogil:
            if pool:
                ptr = bridge_torch_pool_malloc(size_bytes, device, <CUstream>stream)
            else:
                ptr = bridge_torch_malloc(size_bytes, device, <CUstream>stream)
        return <uintptr_t>ptr

    def free(self, uintptr_t ptr, size_t size_bytes, int device, uintptr_t stream):
        """Call the entry point as PyTorch would, without the GIL, for tests."""
        with nogil:
            bridge_torch_free(<void*>ptr, size_bytes, device, <CUstream>stream)

    def record_stream(self, uintptr_t ptr, uintptr_t stream):
        """Call the entry point as PyTorch would, without the GIL, for tests."""
        with nogil:
            bridge_torch_record_stream(<void*>ptr, <CUstream>stream)
