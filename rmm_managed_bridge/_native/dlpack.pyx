# distutils: language = c++
"""Memory as DLPack tensors: capsules that keep an object alive. The layouts are those of DLPack 1.0 (dlpack.h)."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from rmm_managed_bridge._native.process cimport process


cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void* manager_ctx
    void (*deleter)(DLManagedTensor*) noexcept nogil

cdef struct DLPackVersion:
    uint32_t major
    uint32_t minor

cdef struct DLManagedTensorVersioned:
    DLPackVersion version
    void* manager_ctx
    void (*deleter)(DLManagedTensorVersioned*) noexcept nogil
    uint64_t flags
    DLTensor dl_tensor

cdef uint64_t READ_ONLY = 1

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
"""By NumPy's kind of a dtype."""


# A consumer may drop a tensor from any thread, without the GIL, and after the interpreter has ended: then it leaks.
cdef void delete_plain(DLManagedTensor* tensor) noexcept nogil:
    if process.running():
        drop(tensor.manager_ctx, tensor)

cdef void delete_versioned(DLManagedTensorVersioned* tensor) noexcept nogil:
    if process.running():
        drop(tensor.manager_ctx, tensor)

cdef void drop(void* owner, void* tensor) noexcept with gil:
    Py_DECREF(<object>owner)
    free(tensor)


# A capsule that was consumed has another name.
cdef void end_plain(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor"):
        delete_plain(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor"))

cdef void end_versioned(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        delete_versioned(<DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned"))


cdef int fill(DLTensor* tensor, int64_t* lengths, uintptr_t ptr, tuple shape, tuple strides, int code, int itemsize,
              tuple device) except -1:
    tensor.data = <void*>ptr
    tensor.device.device_type, tensor.device.device_id = device
    tensor.ndim = len(shape)
    tensor.dtype.code = code
    tensor.dtype.bits = 8 * itemsize
    tensor.dtype.lanes = 1
    tensor.shape = lengths
    tensor.strides = lengths + len(shape)
    for i in range(len(shape)):
        tensor.shape[i] = shape[i]
        tensor.strides[i] = strides[i]
    return 0


def capsule(owner, uintptr_t ptr, tuple shape, tuple strides, *, int code, int itemsize, tuple device, bint readonly,
            bint versioned):
    """Return a capsule with a tensor over the memory at `ptr`. `owner` lives as long as the tensor.

    `strides` count elements. `readonly` can be said in a versioned tensor only.
    """
    cdef size_t lengths_bytes = 2 * len(shape) * sizeof(int64_t)
    cdef DLManagedTensorVersioned* modern
    cdef DLManagedTensor* plain
    if versioned:
        modern = <DLManagedTensorVersioned*>calloc(1, sizeof(DLManagedTensorVersioned) + lengths_bytes)
        if modern == NULL:
            raise MemoryError
        try:
            fill(&modern.dl_tensor, <int64_t*>(modern + 1), ptr, shape, strides, code, itemsize, device)
            modern.version.major, modern.version.minor = 1, 0
            modern.flags = READ_ONLY if readonly else 0
            modern.manager_ctx = <void*>owner
            modern.deleter = delete_versioned
            made = PyCapsule_New(modern, "dltensor_versioned", end_versioned)
        except BaseException:
            free(modern)
            raise
    else:
        plain = <DLManagedTensor*>calloc(1, sizeof(DLManagedTensor) + lengths_bytes)
        if plain == NULL:
            raise MemoryError
        try:
            fill(&plain.dl_tensor, <int64_t*>(plain + 1), ptr, shape, strides, code, itemsize, device)
            plain.manager_ctx = <void*>owner
            plain.deleter = delete_plain
            made = PyCapsule_New(plain, "dltensor", end_plain)
        except BaseException:
            free(plain)
            raise
    Py_INCREF(owner)
    return made
