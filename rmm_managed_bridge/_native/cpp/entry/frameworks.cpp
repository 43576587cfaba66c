#include "entry/frameworks.hpp"

#include "entry/interpreter.hpp"

using namespace rmm_bridge;

namespace {

[[noreturn]] void python_error() { throw std::runtime_error("a Python error is set"); }

CUstream stream_now(CupyGuest& guest, int device) {
  if (guest.current_stream != nullptr) {
    const std::intptr_t handle = guest.current_stream();
    if (handle == 0 && PyErr_Occurred()) python_error();
    return reinterpret_cast<CUstream>(handle);
  }
  PyObject* asked = PyObject_CallFunction(guest.ask_stream, "i", device);
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
  auto& guest = *static_cast<CupyGuest*>(param);
  const SetAside pending;
  Heap* heap = device >= 0 && device < kDevices ? guest.heaps[device].load(std::memory_order_acquire) : nullptr;
  const CUstream stream = heap == nullptr ? nullptr : stream_now(guest, device);
  Refusal refusal = Refusal::out_of_memory;
  void* ptr = nullptr;
  if (heap != nullptr) {
    const Request request{.bytes = bytes, .alignment = kGpuUnit, .side = Side::gpu, .host_ordered = false, .may_collect = true,
                          .stream = stream, .who = guest.origin->capture(guest.framework, heap->track())};
    bool held = true;
    ptr = heap->allocate(request, refusal, nullptr, &held);
    if (!held) {
      // Without it the block is only waited for more broadly; an error here must not lose the block.
      PyObject* done = PyObject_CallFunction(guest.hold_stream, "Ki", reinterpret_cast<unsigned long long>(stream), device);
      if (done == nullptr) PyErr_WriteUnraisable(guest.hold_stream);
      Py_XDECREF(done);
    }
    if (ptr != nullptr && guest.hint != nullptr && bytes >= guest.process->least_hinted_bytes.load(std::memory_order_relaxed)) {
      PyObject* done = PyObject_CallFunction(guest.hint, "KnK", reinterpret_cast<unsigned long long>(ptr),
                                             static_cast<Py_ssize_t>(bytes), reinterpret_cast<unsigned long long>(stream));
      if (done == nullptr) PyErr_WriteUnraisable(guest.hint);
      Py_XDECREF(done);
    }
  }
  if (refusal != Refusal::none || (ptr == nullptr && bytes != 0)) {
    check(PyObject_CallFunction(guest.refuse, "Kini", reinterpret_cast<unsigned long long>(stream),
                                static_cast<int>(refusal), static_cast<Py_ssize_t>(bytes), device));
    PyErr_SetString(PyExc_MemoryError, "rmm_managed_bridge: out of memory");
    python_error();
  }
  return ptr;
}

void bridge_cupy_free(void* param, void* ptr, int) {
  auto& guest = *static_cast<CupyGuest*>(param);
  Provenance who;
  who.framework = guest.framework;
  Heap::deallocate(*guest.process, ptr, Heap::kUnstated, nullptr, who);
}

// --- PyTorch ---

TorchGuest& rmm_bridge::torch_guest() {
  static auto* the = new TorchGuest();  // never destroyed: PyTorch's last frees come after the destructors of statics
  return *the;
}

namespace {

std::string amount(std::size_t bytes) { return std::to_string(bytes) + " bytes"; }

std::string refusal_text(Heap* heap, Refusal refusal, std::size_t bytes, int device) {
  const std::string what = "rmm_managed_bridge: no " + amount(bytes) + " for PyTorch on device " + std::to_string(device) + ": ";
  if (heap == nullptr) {
    return what + "no pool of the bridge serves this device; call rmm_managed_bridge.install(devices=...) with it";
  }
  switch (heap->process().phase()) {
    case Phase::forked:
      return what + "this process was forked after the pool was made; start workers with the 'spawn' or 'forkserver' method";
    case Phase::exiting:
      return what + "the interpreter is shutting down";
    case Phase::running:
      break;
  }
  switch (refusal) {
    case Refusal::capturing:
      return what + "its stream is being captured; make tensors before the capture begins and use them inside it";
    case Refusal::bad_stream:
    case Refusal::unheld_stream:
      return what + "its stream is not a stream of this device; it may have been destroyed";
    case Refusal::none:
    case Refusal::out_of_memory:
    case Refusal::over_budget:  // not without a tag, which no block has here
      break;
  }
  const PoolNumbers numbers = heap->numbers();
  if (heap->retired() && numbers.reserved_bytes == 0) {
    return what + "this pool was closed by uninstall() or rmm.reinitialize(); call rmm_managed_bridge.install() again";
  }
  return what + "out of memory; " + amount(heap->live_bytes()) + " live, " + amount(numbers.reserved_bytes) +
         " reserved, " + amount(numbers.quarantined_bytes) +
         " waiting for device work; rmm_managed_bridge.snapshot() says who holds them";
}

struct Seen {
  CUstream stream;
  int device;
};

int hold_seen(void* argument) {
  const std::unique_ptr<Seen> seen(static_cast<Seen*>(argument));
  TorchGuest& guest = torch_guest();
  PyObject* done = PyObject_CallFunction(guest.hold_stream, "Ki", reinterpret_cast<unsigned long long>(seen->stream),
                                         seen->device);
  if (done == nullptr) PyErr_WriteUnraisable(guest.hold_stream);
  Py_XDECREF(done);
  guest.holding.store(false);
  return 0;
}

// Until the stream's object is held, its blocks are only waited for more broadly. If the interpreter has too much to do,
// the next block on the stream asks again.
void hold_soon(TorchGuest& guest, CUstream stream, int device) {
  if (guest.hold_stream == nullptr || guest.holding.exchange(true)) return;
  auto seen = std::make_unique<Seen>(Seen{stream, device});
  if (Py_AddPendingCall(hold_seen, seen.get()) == 0) {
    seen.release();
  } else {
    guest.holding.store(false);
  }
}

void* torch_malloc(std::size_t bytes, int device, CUstream stream, bool throws) {
  TorchGuest& guest = torch_guest();
  Heap* heap = device >= 0 && device < kDevices ? guest.heaps[device].load(std::memory_order_acquire) : nullptr;
  Refusal refusal = Refusal::out_of_memory;
  if (heap != nullptr) {
    const Request request{.bytes = bytes, .alignment = kGpuUnit, .side = Side::gpu, .host_ordered = false,
                          .stream = stream, .who = guest.origin->capture(guest.framework, heap->track())};
    bool held = true;
    void* ptr = heap->allocate(request, refusal, nullptr, &held);
    if (refusal == Refusal::none) {
      if (!held) hold_soon(guest, stream, device);
      if (heap->prefetches_new(bytes)) [[unlikely]] heap->prefetch_new(ptr, bytes, stream);
      return ptr;
    }
  } else if (bytes == 0) {
    return nullptr;
  }
  if (!throws && heap != nullptr && refusal == Refusal::out_of_memory && guest.process->running()) return nullptr;
  throw std::runtime_error(refusal_text(heap, refusal, bytes, device));
}

}  // namespace

void* bridge_torch_malloc(std::size_t bytes, int device, CUstream stream) {
  return torch_malloc(bytes, device, stream, true);
}

void* bridge_torch_pool_malloc(std::size_t bytes, int device, CUstream stream) {
  return torch_malloc(bytes, device, stream, false);
}

void bridge_torch_free(void* ptr, std::size_t bytes, int, CUstream) {
  TorchGuest& guest = torch_guest();
  if (guest.process == nullptr || !guest.process->running()) return;
  Provenance who;
  who.framework = guest.framework;
  // PyTorch has kept the handle since the block was made, and names no other. A stream that came from outside may be gone by
  // now, and any call on a dead one may crash the process. So the block goes by the stream it was made on.
  Heap::deallocate(*guest.process, ptr, bytes, nullptr, who);
}

void bridge_torch_record_stream(void* ptr, CUstream stream) {
  TorchGuest& guest = torch_guest();
  if (guest.process == nullptr || !guest.process->running()) return;
  Heap* heap = Heap::of(*guest.process, ptr);
  if (heap == nullptr || expose_block(guest.process, ptr, stream, true) != 0) return;
  if (!holds_stream(heap, stream)) hold_soon(guest, stream, heap->device());
}
