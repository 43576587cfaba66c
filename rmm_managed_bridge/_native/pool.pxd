from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uintptr_t

from rmm_managed_bridge._native.process cimport CPool, DevicePools, Freed, PoolOptions, Refusal

cdef PoolOptions pool_options(object options, bint hugepages, bint concurrent, bint devices) except *
cdef object failure(CPool* heap, Refusal refusal, size_t requested_bytes, uintptr_t stream)
cdef object foreign(uintptr_t ptr, Freed freed)


cdef class Pool:
    cdef CPool* c_pool
    cdef readonly object keep_alive
    cdef readonly str kind
    cdef readonly str track
    cdef readonly int number
    cdef readonly bint closed
    cdef uintptr_t take(self, object size_bytes, size_t alignment, bint cpu, bint ordered, uintptr_t stream,
                        uint8_t framework, object owner) except? 0
    cdef bint acts(self)
    cdef int give(self, uintptr_t ptr, object size_bytes, bint ordered, uintptr_t stream, uint8_t framework) except -1
    cdef void attach(self, CPool* c_pool, str kind, str track, object keep_alive)

cdef int use(DevicePools& pools, int device, Pool pool) except -1
cdef bint serves(DevicePools& pools, int device) noexcept
