#include "entry/cupy.hpp"

#include <stdexcept>

using namespace rmm_bridge;

namespace {

[[noreturn]] void python_error() { throw std::runtime_error("a Python error is set"); }

CUstream stream_now(CupyState& state, int device) {
  if (state.current_stream != nullptr) {
    const std::intptr_t handle = state.current_stream();
    if (handle == 0 && PyErr_Occurred()) python_error();
    return reinterpret_cast<CUstream>(handle);
  }
  PyObject* asked = PyObject_CallFunction(state.ask_stream, "i", device);
  if (asked == nullptr) python_error();
  void* handle = PyLong_AsVoidPtr(asked);
  Py_DECREF(asked);
  if (handle == nullptr && PyErr_Occurred()) python_error();
  return static_cast<CUstream>(handle);
}

// A caller may come with an exception that is on its way, which Python code called from here would take for its own. It is back
// afterwards, unless another one has taken its place.
class SetAside {
 public:
  SetAside() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~SetAside() {
    if (PyErr_Occurred() == nullptr) {
      PyErr_Restore(type_, value_, traceback_);
      return;
    }
    Py_XDECREF(type_);
    Py_XDECREF(value_);
    Py_XDECREF(traceback_);
  }
  SetAside(const SetAside&) = delete;
  SetAside& operator=(const SetAside&) = delete;

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

void check(PyObject* result) {
  if (result == nullptr) python_error();
  Py_DECREF(result);
}

}  // namespace

void* bridge_cupy_malloc(void* param, std::size_t bytes, int device) {
  auto& state = *static_cast<CupyState*>(param);
  const SetAside pending;
  TrackedPool* pool = device >= 0 && device < kDevices ? state.pools[device].load(std::memory_order_acquire) : nullptr;
  const CUstream stream = pool == nullptr ? nullptr : stream_now(state, device);
  Refusal refusal = Refusal::out_of_memory;
  void* ptr = nullptr;
  if (pool != nullptr) {
    const Request request{.bytes = bytes,
                          .alignment = kGpuUnit,
                          .side = Side::gpu,
                          .host_ordered = false,
                          .may_collect = true,
                          .stream = stream,
                          .who = state.origin->capture(state.framework, pool->track())};
    bool held = true;
    ptr = pool->allocate_in_place(request, refusal, nullptr, &held);
    if (!held) {
      // Without it the block is only waited for more broadly; an error here must not lose the block.
      PyObject* done = PyObject_CallFunction(state.hold_stream, "Ki", reinterpret_cast<unsigned long long>(stream), device);
      if (done == nullptr) PyErr_WriteUnraisable(state.hold_stream);
      Py_XDECREF(done);
    }
    if (ptr != nullptr && state.hint != nullptr && bytes >= state.process->least_hinted_bytes.load(std::memory_order_relaxed)) {
      PyObject* done = PyObject_CallFunction(state.hint, "KnK", reinterpret_cast<unsigned long long>(ptr),
                                             static_cast<Py_ssize_t>(bytes), reinterpret_cast<unsigned long long>(stream));
      if (done == nullptr) PyErr_WriteUnraisable(state.hint);
      Py_XDECREF(done);
    }
  }
  if (refusal != Refusal::none || (ptr == nullptr && bytes != 0)) {
    check(PyObject_CallFunction(state.refuse, "Kini", reinterpret_cast<unsigned long long>(stream), static_cast<int>(refusal),
                                static_cast<Py_ssize_t>(bytes), device));
    PyErr_SetString(PyExc_MemoryError, "rmm_managed_bridge: out of memory");
    python_error();
  }
  return ptr;
}

void bridge_cupy_free(void* param, void* ptr, int) {
  auto& state = *static_cast<CupyState*>(param);
  Provenance who;
  who.framework = state.framework;
  TrackedPool::deallocate(*state.process, ptr, TrackedPool::kUnstated, nullptr, who);
}
