# distutils: language = c++
"""NumPy's data-memory handler. See numpy.hpp and NEP 49."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New, PyCapsule_SetPointer
from cpython.ref cimport Py_INCREF, PyObject, PyTypeObject
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uintptr_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy, strcmp, strcpy


cimport numpy as cnp

from rmm_managed_bridge._native.pool cimport Pool, failure
from rmm_managed_bridge._native.process cimport AtomicPool, CPool, CProcess, Origin, Refusal, framework_number, origin, process


cdef extern from "entry/numpy.hpp" namespace "rmm_bridge" nogil:
    cdef cppclass AtomicSize "std::atomic<std::size_t>":
        void store(size_t size)
        size_t load()

    cdef cppclass PlainMemory "rmm_bridge::PlainMemory<rmm_bridge::Origin>":
        void* context
        void* (*malloc)(void*, size_t) noexcept
        void* (*calloc)(void*, size_t, size_t) noexcept
        void* (*realloc)(void*, void*, size_t) noexcept
        void (*free)(void*, void*, size_t) noexcept
        bint numpys_own

    cdef cppclass NumpyState "rmm_bridge::NumpyPythonState":
        CProcess* process
        Origin* origin
        uint8_t framework
        AtomicPool pool
        AtomicSize least_bytes
        PlainMemory plain

    void* numpy_malloc(void* context, size_t size_bytes) noexcept
    void* numpy_calloc(void* context, size_t count, size_t each) noexcept
    void* numpy_realloc(void* context, void* ptr, size_t size_bytes) noexcept
    void numpy_free(void* context, void* ptr, size_t size_bytes) noexcept

    cdef cppclass RefusedRequest:
        CPool* pool
        size_t bytes
        Refusal refusal

    RefusedRequest take_refused_request() noexcept


cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyDataMemAllocator:
        void* ctx
        void* (*malloc)(void*, size_t) noexcept nogil
        void* (*calloc)(void*, size_t, size_t) noexcept nogil
        void* (*realloc)(void*, void*, size_t) noexcept nogil
        void (*free)(void*, void*, size_t) noexcept nogil

    ctypedef struct PyDataMem_Handler:
        char name[127]
        uint8_t version
        PyDataMemAllocator allocator

    object PyArray_NewFromDescr(PyTypeObject* type, cnp.dtype dtype, int ndim, const cnp.npy_intp* lengths,
                                const cnp.npy_intp* steps, void* data, int flags, PyObject* like)
    object PyDataMem_GetHandler()
    PyObject* PyDataMem_DefaultHandler

cnp.import_array()

NAME = "rmm_managed_bridge"

cdef const char* CAPSULE_NAME = "mem_handler"


cdef class NumpyHandler:
    """One handler over one pool at a time. It is never freed: arrays call it for as long as they live."""

    cdef NumpyState* state
    cdef PyDataMem_Handler* handler
    cdef readonly object capsule

    def __cinit__(self):
        # Neither is ever deleted, and the extra reference keeps the capsule: an array's free comes through them after
        # everything else here may be gone.
        self.state = new NumpyState()
        self.state.process = process
        self.state.origin = origin
        self.state.framework = framework_number("numpy")
        self.handler = <PyDataMem_Handler*>calloc(1, sizeof(PyDataMem_Handler))
        if self.handler == NULL:
            raise MemoryError
        strcpy(self.handler.name, "rmm_managed_bridge")
        self.handler.version = 1
        self.handler.allocator.ctx = self.state
        self.handler.allocator.malloc = numpy_malloc
        self.handler.allocator.calloc = numpy_calloc
        self.handler.allocator.realloc = numpy_realloc
        self.handler.allocator.free = numpy_free
        self.capsule = PyCapsule_New(self.handler, CAPSULE_NAME, NULL)
        _immortal.append(self.capsule)

    def use(self, Pool pool, size_t least_bytes=0):
        """New blocks of `least_bytes` or more come from `pool`; from plain memory if it is None."""
        self.state.least_bytes.store(least_bytes)
        self.state.pool.store(<CPool*>NULL if pool is None else pool.c_pool)

    @property
    def active(self):
        """True while new blocks come from a pool."""
        return self.state.pool.load() != NULL

    def malloc(self, size_t size_bytes):
        """Call the handler's malloc and return the address, for tests of the entry point; 0 if it failed."""
        return <uintptr_t>numpy_malloc(self.state, size_bytes)

    def calloc(self, size_t count, size_t each):
        """Call the handler's calloc, likewise."""
        return <uintptr_t>numpy_calloc(self.state, count, each)

    def realloc(self, uintptr_t ptr, size_t size_bytes):
        """Call the handler's realloc, likewise."""
        return <uintptr_t>numpy_realloc(self.state, <void*>ptr, size_bytes)

    def free(self, uintptr_t ptr, size_t size_bytes=0):
        """Call the handler's free, likewise."""
        numpy_free(self.state, <void*>ptr, size_bytes)


cdef class DefaultHandler(NumpyHandler):
    """NumPy's own handler, that of every context without another, taken over for the life of the process.

    NumPy reads a handler's functions out of its capsule when an array is *freed*. So the capsule is pointed at ours
    once and never back: the next free of a pool array would go to the C library. `use` switches between two structures
    that differ in name only; the functions pass on to NumPy's own what is not ours. There is one: `default_handler`.
    """

    cdef PyDataMem_Handler* resting

    def __cinit__(self):
        self.capsule = <object>PyDataMem_DefaultHandler
        cdef PyDataMem_Handler* theirs = self.pointer()
        self.resting = <PyDataMem_Handler*>calloc(1, sizeof(PyDataMem_Handler))
        if self.resting == NULL:
            raise MemoryError
        memcpy(self.resting, self.handler, sizeof(PyDataMem_Handler))
        memcpy(self.resting.name, theirs.name, sizeof(theirs.name))
        self.resting.version = theirs.version
        self.state.plain.context = theirs.allocator.ctx
        self.state.plain.malloc = theirs.allocator.malloc
        self.state.plain.calloc = theirs.allocator.calloc
        self.state.plain.realloc = theirs.allocator.realloc
        self.state.plain.free = theirs.allocator.free
        self.state.plain.numpys_own = strcmp(theirs.name, "default_allocator") == 0
        self.point_at(self.resting)

    cdef PyDataMem_Handler* pointer(self) except NULL:
        return <PyDataMem_Handler*>PyCapsule_GetPointer(self.capsule, CAPSULE_NAME)

    cdef int point_at(self, PyDataMem_Handler* handler) except -1:
        return PyCapsule_SetPointer(self.capsule, handler)

    def use(self, Pool pool, size_t least_bytes=0):
        """As in `NumpyHandler`, for every thread and context without a handler of its own."""
        NumpyHandler.use(self, pool, least_bytes)
        if self.taken_over:
            self.point_at(self.resting if pool is None else self.handler)

    @property
    def taken_over(self):
        """False if somebody pointed NumPy's capsule elsewhere since. Theirs stays: it may pass on to ours."""
        cdef PyDataMem_Handler* now = self.pointer()
        return now == self.handler or now == self.resting

_immortal = []
_default = None


def default_handler():
    """Return the one `DefaultHandler`. The first call takes over NumPy's own, at first without a pool."""
    global _default
    if _default is None:
        _default = DefaultHandler()
    return _default


def take_refusal():
    """Return (size in bytes, error) of this thread's newest request that a pool refused, once; None if there is none."""
    cdef RefusedRequest refused = take_refused_request()
    if refused.pool == NULL:
        return None
    return refused.bytes, failure(refused.pool, refused.refusal, refused.bytes, 0)


def current():
    """Return the capsule of the handler that is current in this context."""
    return PyDataMem_GetHandler()


cdef extern from *:
    """
    // Null stands for NumPy's own handler, and Cython has no null object to pass.
    static PyObject* set_handler(PyObject* handler) { return PyDataMem_SetHandler(handler == Py_None ? NULL : handler); }
    """
    object set_handler(object handler)


def set_current(capsule):
    """Make a handler current in this context (None: NumPy's own) and return the one before."""
    return set_handler(capsule)


def describe(cnp.ndarray x):
    """Return (address of element 0, shape, strides, dtype, read-only) of an array; None for strides in C's order."""
    return (
        <uintptr_t>cnp.PyArray_DATA(x), (<object>x).shape, None if cnp.PyArray_IS_C_CONTIGUOUS(x) else (<object>x).strides,
        x.descr, not cnp.PyArray_ISWRITEABLE(x),
    )


def array_over(uintptr_t ptr, tuple shape, tuple strides, cnp.dtype dtype, bint readonly, base):
    """Return an array over memory that `base` keeps; None for strides in C's order. `shape` and `strides` are trusted."""
    cdef cnp.npy_intp lengths[64]  # NPY_MAXDIMS of NumPy 2
    cdef cnp.npy_intp steps[64]
    cdef cnp.npy_intp* stepping = NULL
    cdef int ndim = len(shape)
    if ndim > 64:
        raise ValueError(f"NumPy has arrays of up to 64 dimensions, not {ndim}")
    if strides is not None:
        stepping = steps
    for i in range(ndim):
        lengths[i] = shape[i]
        if strides is not None:
            steps[i] = strides[i]
    Py_INCREF(dtype)  # which the call below takes
    cdef cnp.ndarray array = PyArray_NewFromDescr(
        <PyTypeObject*>cnp.ndarray, dtype, ndim, lengths, stepping, <void*>ptr,
        0 if readonly else cnp.NPY_ARRAY_WRITEABLE, <PyObject*>NULL,
    )
    cnp.set_array_base(array, base)
    return array
