// What `hint_table` needs in C++: hints of live blocks, and driver calls made from Python as native code makes them.
#pragma once

#include <algorithm>
#include <memory>

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

inline bool note_advice(Process* process, const void* ptr, std::uintptr_t low, std::uintptr_t high, std::uint8_t advice,
                        std::uint64_t accessors) {
  return Heap::note_hint(*process, ptr, [&](std::uintptr_t start) { process->hints.advise(start, low, high, advice, accessors); });
}

inline bool note_placement(Process* process, const void* ptr, std::int16_t placement) {
  return Heap::note_hint(*process, ptr, [&](std::uintptr_t start) { process->hints.place(start, placement); });
}

inline void take_back_advice(Process* process, const void* ptr, std::uintptr_t low, std::uintptr_t high,
                             std::uint8_t advice, std::uint64_t accessors) {
  const Heap::Found found = Heap::find(*process, ptr);
  if (found.block == nullptr) return;
  process->hints.take_back(reinterpret_cast<std::uintptr_t>(found.start), low, high, advice, accessors);
}

inline Hinted hints_of(Process* process, const void* ptr) {
  const Heap::Found found = Heap::find(*process, ptr);
  if (found.block == nullptr || (found.block->flags.load() & Block::kHinted) == 0) return {};
  return process->hints.read(reinterpret_cast<std::uintptr_t>(found.start));
}

// How many live blocks other than the one at `ptr` have bytes in [low, high), which are whole pages around bytes of that
// block. Spans are whole granules, which are whole pages, so only blocks of the same slab can.
inline std::size_t count_sharing(Process* process, const void* ptr, std::uintptr_t low, std::uintptr_t high) {
  const Heap::Found found = Heap::find(*process, ptr);
  if (found.block == nullptr || found.span->block_count == 1) return 0;
  const auto base = reinterpret_cast<std::uintptr_t>(found.span->base);
  Block* blocks = found.span->blocks.load(std::memory_order_acquire);
  const std::uint32_t own = found.span->index_of(ptr);
  const std::uint32_t last = std::min(found.span->index_of(reinterpret_cast<const void*>(high - 1)), found.span->block_count - 1);
  std::size_t count = 0;
  for (std::uint32_t index = found.span->index_of(reinterpret_cast<const void*>(std::max(low, base))); index <= last; ++index) {
    if (index != own && (blocks[index].flags.load() & Block::kLive) != 0) ++count;
  }
  return count;
}

// What the stream is now, seen by the heap of `ptr`: good, capturing, or unknown to the driver.
inline Refusal stream_state(Process* process, const void* ptr, CUstream stream) {
  Heap* heap = Heap::of(*process, ptr);
  if (heap == nullptr || !heap->ordered() || !process->running()) return Refusal::bad_stream;
  DriverScope scope(&process->driver, heap->events()->context());
  if (heap->events()->capture_status(stream) != CU_STREAM_CAPTURE_STATUS_NONE) return Refusal::capturing;
  StreamRef ref;
  return heap->resolve(stream, ref);
}

// The heap's context made current and the capture mode relaxed, as for all our own calls; null without a driver.
inline DriverScope* open_scope(Process* process, const void* ptr) {
  Heap* heap = Heap::of(*process, ptr);
  if (heap == nullptr || !heap->ordered() || !process->running()) return nullptr;
  return new DriverScope(&process->driver, heap->events()->context());
}

inline void set_least_hinted(Process* process, std::size_t bytes) { process->least_hinted_bytes.store(bytes); }

inline void set_least_prefetched(Process* process, std::size_t bytes) { process->new_blocks.least_bytes.store(bytes); }

inline std::uint64_t take_count(Process* process, int outcome) { return process->new_blocks.counts[outcome].exchange(0); }

}  // namespace rmm_bridge
