// Pool, the part without its lock: a stream takes again what was freed on it last.
#pragma once

#include "pool/pool.hpp"
#include "pool/stream_lookup.hpp"

namespace rmm_bridge {

// A batch of deferred blocks: so few bytes that the next ones are still in the processor's caches, and enough blocks to share an
// event and its query, 500 ns for each held stream.
inline constexpr std::ptrdiff_t kDeferredBlocks = 2048;
inline constexpr std::size_t kDeferredBytes = std::size_t{1} << 20;

[[gnu::always_inline]] inline Block* Pool::take_front(const SizeClass& size, std::size_t asked_bytes, Side side,
                                                      const KnownStream& stream) noexcept {
  Lane* const lane = stream.host() ? &lanes_.at(ready_lane(side)) : stream.lane;
  if (lane == nullptr) return nullptr;
  Front& front = lane->front;
  Block* block;
  {
    const Locked lock(front.lock);
    if (front.key.load(std::memory_order_relaxed) != stream.key) [[unlikely]]
      return nullptr;
    BlockStack& bin = front.bins[size.index];
    if (bin.empty()) [[unlikely]]
      return nullptr;
    block = bin.pop();
    front.free_bytes -= size.bytes;
    front.asked_delta += static_cast<std::ptrdiff_t>(asked_bytes);
    ++front.live_delta;
  }
  block->entry.store(0, std::memory_order_relaxed);
  block->lane.store(lane->index, std::memory_order_relaxed);
  block->flags.store(Block::kLive, std::memory_order_release);
  return block;
}

// True if the block went to the front of the lane it came from. A large block that nothing touches goes to the page pool.
// With work on streams about, a CPU block goes to the deferred lane instead; `full`: that has enough for a batch.
[[gnu::always_inline]] inline bool Pool::put_front(const Freeing& freed, const StreamRef* stream, bool& full) noexcept {
  const auto& [span, block, asked_bytes, born_ns] = freed;
  std::uint16_t index = block->lane.load(std::memory_order_relaxed);
  if (index < kFirstStreamLane) {
    if (index != ready_lane(span->side)) return false;
    if (span->side == Side::cpu && defers_cpu_frees()) {
      if (lanes_.any_capture()) [[unlikely]]
        return false;  // each by itself, since it depends on its age what it waits for
      index = kDeferredLane;
    } else if (span->large()) {
      return false;
    }
  } else if (options_.debug) [[unlikely]] {
    return false;
  }
  Front& front = lanes_.at(index).front;
  const Locked lock(front.lock);
  const std::uint64_t key = front.key.load(std::memory_order_relaxed);
  if (key == Front::kClosed || (stream != nullptr && key != stream->key)) return false;
  BlockStack* bin = &front.bins[span->class_index];
  if (bin->full()) [[unlikely]] {
    try {
      bin = &front.make_room(span->class_index, 1);
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  bin->push(block);
  front.free_bytes += span->block_bytes;
  front.asked_delta -= static_cast<std::ptrdiff_t>(asked_bytes);
  --front.live_delta;
  if (index == kDeferredLane) {
    const int shift = deferred_shift_.load(std::memory_order_relaxed);
    full = front.drained_count - front.live_delta >= kDeferredBlocks << shift ||
           front.drained_bytes + front.free_bytes >= kDeferredBytes << shift;
  }
  return true;
}

}  // namespace rmm_bridge
