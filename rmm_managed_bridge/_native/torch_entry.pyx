# distutils: language = c++
"""The native entry points for PyTorch. See torch.hpp."""

from cpython.ref cimport Py_INCREF, PyObject
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uintptr_t

from rmm_managed_bridge._native.pool cimport Pool, serves, use
from rmm_managed_bridge._native.process cimport CProcess, CUstream, DevicePools, Origin, framework_number, origin, process


cdef extern from "entry/torch.hpp" namespace "rmm_bridge" nogil:
    cdef cppclass CTorchState "rmm_bridge::TorchState":
        CProcess* process
        Origin* origin
        uint8_t framework
        DevicePools pools
        PyObject* hold_stream

    CTorchState& torch_state()

    void* bridge_torch_malloc "bridge_torch_malloc"(size_t size_bytes, int device, CUstream stream) except +
    void* bridge_torch_pool_malloc "bridge_torch_pool_malloc"(size_t size_bytes, int device, CUstream stream) except +
    void bridge_torch_free "bridge_torch_free"(void* ptr, size_t size_bytes, int device, CUstream stream)
    void bridge_torch_record_stream "bridge_torch_record_stream"(void* ptr, CUstream stream)


cdef class TorchEntry:
    """PyTorch's entry points: all objects stand for the one state of this process, and the newest one's function counts.

    ``hold_stream(handle, device)`` is called from the interpreter's main loop, soon after a block was made on a stream
    that the bridge does not hold.
    """

    def __cinit__(self, hold_stream):
        state = &torch_state()
        state.process = process
        state.origin = origin
        state.framework = framework_number("torch")
        Py_INCREF(hold_stream)  # never let go: a call may be on its way
        state.hold_stream = <PyObject*>hold_stream

    def use(self, int device, Pool pool):
        """Blocks for `device` come from `pool`; with None, requests fail."""
        use(torch_state().pools, device, pool)

    def serves(self, int device):
        """Return True if a pool that takes requests stands behind `device`."""
        return serves(torch_state().pools, device)

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
