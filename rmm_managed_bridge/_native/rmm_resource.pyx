# distutils: language = c++
"""ManagedBridgeResource: ledger over pool over an upstream RMM resource. See rmm.hpp."""

cimport cython
from cython.operator cimport dereference
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uintptr_t
from libcpp cimport bool
from libcpp.memory cimport unique_ptr
from libcpp.optional cimport optional
from rmm.librmm.memory_resource cimport device_async_resource_ref
from rmm.pylibrmm.device_buffer cimport DeviceBuffer
from rmm.pylibrmm.memory_resource cimport DeviceMemoryResource, UpstreamResourceAdaptor
from rmm.pylibrmm.stream cimport Stream
from rmm.pylibrmm.utils cimport as_stream

from rmm_managed_bridge._native.pool cimport Pool, pool_options
from rmm_managed_bridge._native.process cimport CPool, CProcess, CUstream, Origin, PoolOptions, framework_number, origin, process


from rmm.pylibrmm.stream import DEFAULT_STREAM

from rmm_managed_bridge._native.process import KINDS, TRACKS


cdef extern from "entry/rmm.hpp" namespace "rmm_bridge" nogil:
    cdef cppclass BridgeResource:
        BridgeResource(CPool* pool, Origin* origin, uint8_t framework)

    CPool* new_rmm_pool(
        CProcess* process, device_async_resource_ref upstream, bool ordered, int device, const PoolOptions& options, int kind,
        int track
    ) except +


cdef extern from *:
    optional[device_async_resource_ref] make_device_async_resource_ref(BridgeResource&) except +


def stream_of_buffer(DeviceBuffer buffer):
    """Return the stream object that an `rmm.DeviceBuffer` was made on and will be freed on."""
    return buffer.stream


def owner_of(Stream stream):
    """Return the object that a stream of RMM's keeps alive; None if it wraps a bare handle."""
    return stream._owner


cdef dict vouched = {}  # by type: whether a stream lives as long as its object, which is asked for each block


cdef bint vouched_for(owner):
    if owner is None:
        return False
    known = vouched.get(type(owner))
    if known is None:
        root = type(owner).__module__.partition(".")[0]
        known = vouched[type(owner)] = (root, type(owner).__name__) in (("rmm", "CudaStream"), ("cupy", "Stream"))
    return known


@cython.no_gc_clear
cdef class NativeBridgeResource(UpstreamResourceAdaptor):
    """The native half of :class:`rmm_managed_bridge.ManagedBridgeResource`, which checks the arguments."""

    cdef unique_ptr[BridgeResource] c_obj
    cdef readonly Pool pool
    cdef uint8_t framework

    def __cinit__(self, DeviceMemoryResource upstream_mr, *, bint ordered, int device, object settings, str kind,
                  str track, bint hugepages, bint concurrent):
        cdef Pool pool = Pool.__new__(Pool)
        pool.attach(
            new_rmm_pool(
                process, upstream_mr.get_mr(), ordered, device, pool_options(settings, hugepages, concurrent, True),
                KINDS.index(kind), TRACKS.index(track),
            ),
            kind, track, upstream_mr,
        )
        self.pool = pool
        self.framework = framework_number("rmm")
        self.c_obj.reset(new BridgeResource(pool.c_pool, origin, self.framework))
        self.c_ref = make_device_async_resource_ref(dereference(self.c_obj))

    def allocate(self, nbytes, stream=DEFAULT_STREAM):
        """Allocate `nbytes` bytes on `stream` and return the address; 0 for no bytes.

        Parameters
        ----------
        nbytes : int
            How many bytes.
        stream : rmm.pylibrmm.stream.Stream, or anything with ``__cuda_stream__``
            The block may be used by work enqueued on it from now on.

        Raises
        ------
        MemoryError
            If neither the pool nor its upstream has the memory. Says who holds the most.
        BridgeError
            If the stream is being captured. The capture stays valid.
        """
        cdef Stream native = as_stream(stream)
        cdef uintptr_t handle = <uintptr_t>native.view().get()
        cdef uintptr_t ptr = self.pool.take(
            nbytes, 256, False, True, handle, self.framework, native if vouched_for(native._owner) else None,
        )
        cdef CPool* pool = self.pool.c_pool
        cdef size_t size_bytes = nbytes
        if pool.prefetches_new(size_bytes):
            with nogil:
                pool.prefetch_new(<void*>ptr, size_bytes, <CUstream>handle)
        return ptr

    def deallocate(self, uintptr_t ptr, nbytes, stream=DEFAULT_STREAM):
        """Free the block at `ptr`, after the work enqueued on `stream` until now.

        Raises
        ------
        ForeignPointerError
            If `ptr` is not the start of a live block of the bridge. Nothing is freed.
        """
        cdef Stream native = as_stream(stream)
        self.pool.give(ptr, nbytes, True, <uintptr_t>native.view().get(), self.framework)

    def get_allocated_bytes(self):
        """Return the bytes of the blocks that are live, as they were asked for."""
        return self.pool.live_bytes

    def __repr__(self):
        return f"<{type(self).__name__}: {self.pool!r} over {type(self.upstream_mr).__name__}>"
