// NumPy's data-memory handler over a pool: malloc, calloc, realloc and free, with and without the GIL.
//
// `Origin` says who asks and whether this thread holds the GIL; all that is Python's is behind it (numpy_python.hpp).
//
// A block is known by its address: what lies in one of our ranges is ours, whatever is installed by then, and anything
// else came from the plain memory behind the handler. So arrays may outlive the pool's use, and the switch is one pointer.
#pragma once

#include <cstdlib>
#include <cstring>

#include "pool/fork_copy.hpp"
#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

// The newest request of this thread that a pool refused, until somebody asks: NumPy makes the exception, long after.
struct RefusedRequest {
  TrackedPool* pool = nullptr;
  std::size_t bytes = 0;
  Refusal refusal = Refusal::none;
};
inline thread_local RefusedRequest refused_request;

// Where blocks come from that the pool does not give, and where they go back to: the C library, or the functions that a
// handler had before it was taken over.
template <typename Origin>
struct PlainMemory {
  void* context = nullptr;
  void* (*malloc)(void*, std::size_t) = [](void*, std::size_t bytes) { return std::malloc(bytes); };
  void* (*calloc)(void*, std::size_t, std::size_t) = [](void*, std::size_t count, std::size_t each) {
    return std::calloc(count, each);
  };
  void* (*realloc)(void*, void*, std::size_t) = [](void*, void* ptr, std::size_t bytes) { return std::realloc(ptr, bytes); };
  void (*free)(void*, void*, std::size_t) = [](void*, void* ptr, std::size_t) { std::free(ptr); };
  bool numpys_own = false;

  // NumPy's own functions keep freed blocks of less than this in a table that nothing but the GIL guards, and their
  // calloc lets go of a GIL that the caller must have. A caller without it is sent around both: a larger block is as
  // good, also for the table, which it may enter later under the size that NumPy states.
  static constexpr std::size_t kTableBytes = 1024;

  void* allocate(std::size_t bytes, bool zeros) const noexcept {
    if (numpys_own && !Origin::holds_gil()) {
      void* ptr = malloc(context, std::max(bytes, kTableBytes));
      if (ptr != nullptr && zeros) std::memset(ptr, 0, bytes);
      return ptr;
    }
    return zeros ? calloc(context, 1, bytes) : malloc(context, bytes);
  }

  void deallocate(void* ptr, std::size_t bytes) const noexcept {
    if (numpys_own && bytes < kTableBytes && !Origin::holds_gil()) bytes = kTableBytes;
    free(context, ptr, bytes);
  }
};

template <typename Origin>
struct NumpyState {
  Process* process = nullptr;
  Origin* origin = nullptr;
  std::uint8_t framework = 0;
  std::atomic<TrackedPool*> pool{nullptr};  // null: new blocks come from plain memory
  std::atomic<std::size_t> least_bytes{0};
  PlainMemory<Origin> plain;  // never changed once a handler with this state can be called

  void* allocate(std::size_t bytes, bool zeros) noexcept {
    // NumPy promises its callers a distinct pointer, also for arrays without elements, and asks for at least one byte.
    bytes = std::max<std::size_t>(bytes, 1);
    TrackedPool* from = pool.load(std::memory_order_acquire);
    if (from == nullptr || bytes < least_bytes.load(std::memory_order_relaxed) || !process->running()) {
      return plain.allocate(bytes, zeros);
    }
    const Request request{.bytes = bytes, .alignment = kCpuUnit, .who = origin->capture(framework, from->track())};
    Refusal refusal;
    bool zeroed = false;
    void* ptr = from->allocate_in_place(request, refusal, &zeroed);
    if (ptr == nullptr) {
      if (refusal == Refusal::host_function) return plain.allocate(bytes, zeros);
      refused_request = {from, bytes, refusal};
    }
    if (ptr != nullptr && zeros && !zeroed) from->fill_with_zeros(static_cast<char*>(ptr), bytes);
    return ptr;
  }

  void deallocate(void* ptr, std::size_t bytes) noexcept {
    const TrackedPool::Found found = TrackedPool::find(*process, ptr);
    if (found.span == nullptr) {
      plain.deallocate(ptr, bytes);
      return;
    }
    // NumPy states a size, but the size of the array, which is not always what it asked for: 0 elements ask for 1 byte,
    // and a resized array of a subclass may differ. The ledger knows.
    Provenance who;
    who.framework = framework;
    TrackedPool::deallocate_in_place(*process, found, ptr, TrackedPool::kUnstated, nullptr, who);
  }

  void* reallocate(void* ptr, std::size_t bytes) noexcept {
    bytes = std::max<std::size_t>(bytes, 1);
    if (ptr == nullptr) return allocate(bytes, false);
    TrackedPool* const pool = TrackedPool::of(*process, ptr);
    if (pool == nullptr) return plain.realloc(plain.context, ptr, bytes);
    if (!pool->acts()) return move_out(ptr, bytes);
    Refusal refusal;
    void* const moved = TrackedPool::reallocate(*process, ptr, bytes, refusal);
    if (moved == nullptr && refusal == Refusal::host_function) return move_to_plain(ptr, bytes);
    if (moved == nullptr && refusal != Refusal::none) refused_request = {pool, bytes, refusal};
    return moved;
  }

 private:
  // In a host function. A block that streams were shown cannot be copied there, since their work would have to be waited for.
  void* move_to_plain(void* ptr, std::size_t bytes) noexcept {
    const TrackedPool::Found found = TrackedPool::find(*process, ptr);
    if (found.block == nullptr || (found.block->flags.load() & Block::kShown) != 0) return nullptr;
    void* copy = plain.allocate(bytes, false);
    if (copy == nullptr) return nullptr;
    std::memcpy(copy, ptr, std::min<std::size_t>(bytes, found.span->block_bytes));
    deallocate(ptr, bytes);
    return copy;
  }

  // Forked or exiting: the block stays where it is, unfreed. In a forked child managed pages that were not copied before the fork
  // cannot be read (SIGSEGV).
  void* move_out(void* ptr, std::size_t bytes) noexcept {
    const TrackedPool::Found found = TrackedPool::find(*process, ptr);
    const auto* from = found.block == nullptr ? nullptr : static_cast<TrackedPool*>(found.span->pool);
    if (from == nullptr || found.start != ptr) return nullptr;
    std::size_t copied = std::min(bytes, found.span->block_bytes);
    if (from->inherited() && from->device() >= 0) {
      copied = inherited_bytes(*process, found, copied);
      if (copied == 0) return nullptr;
    }
    void* copy = plain.allocate(bytes, false);
    if (copy != nullptr) std::memcpy(copy, ptr, copied);
    return copy;
  }
};

// The four functions as NumPy calls them; the context is a state.
template <typename State>
struct NumpyEntries {
  static void* malloc(void* context, std::size_t bytes) { return of(context)->allocate(bytes, false); }

  static void* calloc(void* context, std::size_t count, std::size_t each) {
    std::size_t bytes;
    if (__builtin_mul_overflow(count, each, &bytes)) return nullptr;
    return of(context)->allocate(bytes, true);
  }

  static void* realloc(void* context, void* ptr, std::size_t bytes) { return of(context)->reallocate(ptr, bytes); }

  static void free(void* context, void* ptr, std::size_t bytes) {
    if (ptr != nullptr) of(context)->deallocate(ptr, bytes);
  }

 private:
  static State* of(void* context) { return static_cast<State*>(context); }
};

}  // namespace rmm_bridge
