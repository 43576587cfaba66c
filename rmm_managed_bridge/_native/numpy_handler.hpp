// NumPy's data-memory handler over a heap: malloc, calloc, realloc and free in native code, with and without the GIL.
//
// A block is known by its address: what lies in one of our ranges is ours, whatever is installed by then, and anything
// else came from the C library. So arrays may outlive the pool's use, and the switch is one pointer.
#pragma once

#include <Python.h>

#include <cstdlib>
#include <cstring>

#include "call_site.hpp"
#include "heap.hpp"

namespace rmm_bridge {

struct NumpyGuest {
  Process* process = nullptr;
  Origin* origin = nullptr;
  std::uint8_t framework = 0;
  std::atomic<Heap*> heap{nullptr};  // null: new blocks come from the C library
  std::atomic<std::size_t> least_bytes{0};

  void* allocate(std::size_t bytes, bool zeros) noexcept {
    // NumPy promises its callers a distinct pointer, also for arrays without elements, and asks for at least one byte.
    bytes = std::max<std::size_t>(bytes, 1);
    Heap* from = heap.load(std::memory_order_acquire);
    if (from == nullptr || bytes < least_bytes.load(std::memory_order_relaxed) || !process->running()) {
      return zeros ? std::calloc(1, bytes) : std::malloc(bytes);
    }
    Request request;
    request.bytes = bytes;
    request.alignment = kCpuUnit;
    request.side = Side::cpu;
    request.who = origin->capture(framework, from->track());
    Refusal refusal;
    bool zeroed = false;
    void* ptr = from->allocate(request, refusal, &zeroed);
    if (ptr != nullptr && zeros && !zeroed) std::memset(ptr, 0, bytes);
    return ptr;
  }

  void deallocate(void* ptr) noexcept {
    if (Heap::of(*process, ptr) == nullptr) {
      std::free(ptr);
      return;
    }
    // NumPy states a size, but the size of the array, which is not always what it asked for: 0 elements ask for 1 byte,
    // and a resized array of a subclass may differ. The ledger knows.
    Provenance who;
    who.framework = framework;
    Heap::deallocate(*process, ptr, Heap::kUnstated, nullptr, who);
  }

  void* reallocate(void* ptr, std::size_t bytes) noexcept {
    bytes = std::max<std::size_t>(bytes, 1);
    if (ptr == nullptr) return allocate(bytes, false);
    if (Heap::of(*process, ptr) == nullptr) return std::realloc(ptr, bytes);
    if (process->running()) return Heap::reallocate(*process, ptr, bytes);
    return move_out(ptr, bytes);
  }

 private:
  // Forked or exiting: the block stays where it is, unfreed. In a forked child managed pages cannot be read (SIGSEGV),
  // so only host memory is copied.
  void* move_out(void* ptr, std::size_t bytes) noexcept {
    const Heap::Found found = Heap::find(*process, ptr);
    const auto* from = found.block == nullptr ? nullptr : static_cast<Heap*>(found.span->pool);
    if (from == nullptr || found.start != ptr) return nullptr;
    if (process->phase.load() == Phase::forked && from->device() >= 0) return nullptr;
    void* copy = std::malloc(bytes);
    if (copy != nullptr) std::memcpy(copy, ptr, std::min(bytes, found.span->block_bytes));
    return copy;
  }
};

inline NumpyGuest* guest_of(void* context) { return static_cast<NumpyGuest*>(context); }

inline void* numpy_malloc(void* context, std::size_t bytes) { return guest_of(context)->allocate(bytes, false); }

inline void* numpy_calloc(void* context, std::size_t count, std::size_t each) {
  std::size_t bytes;
  if (__builtin_mul_overflow(count, each, &bytes)) return nullptr;
  return guest_of(context)->allocate(bytes, true);
}

inline void* numpy_realloc(void* context, void* ptr, std::size_t bytes) {
  return guest_of(context)->reallocate(ptr, bytes);
}

inline void numpy_free(void* context, void* ptr, std::size_t) {
  if (ptr != nullptr) guest_of(context)->deallocate(ptr);
}

}  // namespace rmm_bridge
