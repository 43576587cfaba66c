#include "entry/torch.hpp"

#include <memory>
#include <stdexcept>
#include <string>

#include "pool/block_calls.hpp"
#include "pool/pool_calls.hpp"

using namespace rmm_bridge;

TorchState& rmm_bridge::torch_state() {
  static auto* the = new TorchState();  // never destroyed: PyTorch's last frees come after the destructors of statics
  return *the;
}

namespace {

std::string amount(std::size_t bytes) { return std::to_string(bytes) + " bytes"; }

std::string refusal_text(TrackedPool* pool, Refusal refusal, std::size_t bytes, int device) {
  const std::string what = "rmm_managed_bridge: no " + amount(bytes) + " for PyTorch on device " + std::to_string(device) + ": ";
  if (pool == nullptr) {
    return what + "no pool of the bridge serves this device; call rmm_managed_bridge.install(devices=...) with it";
  }
  switch (pool->inherited() ? Phase::forked : pool->process().phase()) {
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
    case Refusal::other_device:
    case Refusal::bad_stream:
    case Refusal::unheld_stream:
      return what + "its stream is not a stream of this device; it may have been destroyed";
    case Refusal::none:
    case Refusal::out_of_memory:
    case Refusal::timed_out:
    case Refusal::host_function:  // not for memory of a stream
    case Refusal::over_budget:    // not without a tag, which no block has here
      break;
  }
  const PoolNumbers numbers = pool->numbers();
  if (pool->retired() && numbers.reserved_bytes == 0) {
    return what + "this pool was closed by uninstall() or rmm.reinitialize(); call rmm_managed_bridge.install() again";
  }
  return what + "out of memory; " + amount(pool->live_bytes()) + " live, " + amount(numbers.reserved_bytes) + " reserved, " +
         amount(numbers.quarantined_bytes) + " waiting for device work; rmm_managed_bridge.snapshot() says who holds them";
}

struct Seen {
  CUstream stream;
  int device;
};

int hold_seen(void* argument) {
  const std::unique_ptr<Seen> seen(static_cast<Seen*>(argument));
  TorchState& state = torch_state();
  PyObject* done =
      PyObject_CallFunction(state.hold_stream, "Ki", reinterpret_cast<unsigned long long>(seen->stream), seen->device);
  if (done == nullptr) PyErr_WriteUnraisable(state.hold_stream);
  Py_XDECREF(done);
  state.holding.store(false);
  return 0;
}

// Until the stream's object is held, its blocks are only waited for more broadly. If the interpreter has too much to do,
// the next block on the stream asks again.
void hold_soon(TorchState& state, CUstream stream, int device) {
  if (state.hold_stream == nullptr || state.holding.exchange(true)) return;
  auto seen = std::make_unique<Seen>(Seen{stream, device});
  if (call_soon(hold_seen, seen.get())) {
    seen.release();
  } else {
    state.holding.store(false);
  }
}

void* torch_malloc(std::size_t bytes, int device, CUstream stream, bool throws) {
  TorchState& state = torch_state();
  // A MemPool's calls come under PyTorch's lock, and some with the GIL: with that the next one waits for the lock. Null, and PyTorch
  // gives back what it caches and asks once more.
  const KeepGil keep(!throws && Origin::holds_gil());
  TrackedPool* pool = device >= 0 && device < kDevices ? state.pools[device].load(std::memory_order_acquire) : nullptr;
  Refusal refusal = Refusal::out_of_memory;
  if (pool != nullptr) {
    const Request request{.bytes = bytes,
                          .alignment = kGpuUnit,
                          .side = Side::gpu,
                          .host_ordered = false,
                          .stream = stream,
                          .who = state.origin->capture(state.framework, pool->track())};
    bool held = true;
    void* ptr = pool->allocate_in_place(request, refusal, nullptr, &held);
    if (refusal == Refusal::none) {
      if (!held) hold_soon(state, stream, device);
      if (pool->prefetches_new(bytes)) [[unlikely]]
        pool->prefetch_new(ptr, bytes, stream);
      return ptr;
    }
  } else if (bytes == 0) {
    return nullptr;
  }
  const bool none_left = refusal == Refusal::out_of_memory || refusal == Refusal::timed_out;
  if (!throws && pool != nullptr && none_left && state.process->running()) return nullptr;
  throw std::runtime_error(refusal_text(pool, refusal, bytes, device));
}

}  // namespace

void* bridge_torch_malloc(std::size_t bytes, int device, CUstream stream) { return torch_malloc(bytes, device, stream, true); }

void* bridge_torch_pool_malloc(std::size_t bytes, int device, CUstream stream) {
  return torch_malloc(bytes, device, stream, false);
}

void bridge_torch_free(void* ptr, std::size_t bytes, int, CUstream) {
  TorchState& state = torch_state();
  if (state.process == nullptr || !state.process->running()) return;
  const KeepGil keep(Origin::holds_gil());  // as above
  Provenance who;
  who.framework = state.framework;
  // PyTorch has kept the handle since the block was made, and names no other. A stream that came from outside may be gone by
  // now, and any call on a dead one may crash the process. So the block goes by the stream it was made on.
  TrackedPool::deallocate(*state.process, ptr, bytes, nullptr, who);
}

void bridge_torch_record_stream(void* ptr, CUstream stream) {
  TorchState& state = torch_state();
  if (state.process == nullptr || !state.process->running()) return;
  TrackedPool* pool = TrackedPool::of(*state.process, ptr);
  if (pool == nullptr || record_stream_use(state.process, ptr, stream, true) != 0) return;
  if (!holds_stream(pool, stream)) hold_soon(state, stream, pool->device());
}
