// Pool, the part without its lock: a stream takes again what was freed on it last. Included by pool.hpp.
#pragma once

#include "pool/pool.hpp"
#include "pool/stream_lookup.hpp"

namespace rmm_bridge {

// A batch of fresh blocks: so few bytes that the next ones are still in the processor's caches, and enough blocks to share an
// event and its query, 500 ns for each held stream.
inline constexpr std::ptrdiff_t kFreshBlocks = 2048;
inline constexpr std::size_t kFreshBytes = std::size_t{1} << 20;

inline constexpr std::size_t kRefill = 64;

[[gnu::always_inline]] inline Block* Pool::take_front(const SizeClass& size, std::size_t asked_bytes, Side side,
                                                      const StreamRef& stream) noexcept {
  Lane* const lane = stream.host() ? &lanes_.at(ready_lane(side)) : stream.lane;
  if (lane == nullptr) return nullptr;
  Front& front = lane->front;
  Block* block;
  {
    const Locked lock(front.lock);
    if (front.key.load(std::memory_order_relaxed) != stream.key) [[unlikely]] return nullptr;
    BlockStack& bin = front.bins[size.index];
    if (bin.empty()) [[unlikely]] return nullptr;
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

// True if the block went to the front of the lane it came from. A large block that nothing touches goes to the page heap.
// With work on streams about, a CPU block goes to the fresh lane instead; `full`: that has enough for a batch.
[[gnu::always_inline]] inline bool Pool::put_front(const Freeing& freed, const StreamRef* stream, bool& full) noexcept {
  const auto& [span, block, asked_bytes] = freed;
  std::uint16_t index = block->lane.load(std::memory_order_relaxed);
  if (index < kFirstStreamLane) {
    if (index != ready_lane(span->side)) return false;
    if (span->side == Side::cpu && defers_cpu_frees()) {
      index = kFreshLane;
    } else if (span->block_count == 1) {
      return false;
    }
  } else if (options_.alone) [[unlikely]] {
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
  if (index == kFreshLane) {
    const int shift = fresh_shift_.load(std::memory_order_relaxed);
    full = -front.live_delta >= kFreshBlocks << shift || front.free_bytes >= kFreshBytes << shift;
  }
  return true;
}

// Lets the next requests of the class be served in front. They would drain it only to come here again.
inline void Pool::refill(Lane& lane, const SizeClass& size) noexcept {
  auto& bin = lane.bins[size.index];
  const std::size_t count = std::min(bin.size(), kRefill);
  if (count == 0) return;
  std::scoped_lock lock(lane.front.lock);
  if (lane.front.key.load(std::memory_order_relaxed) == Front::kClosed) return;
  try {
    BlockStack& front = lane.front.make_room(size.index, count);
    for (auto block = bin.end() - static_cast<std::ptrdiff_t>(count); block != bin.end(); ++block) front.push(*block);
  } catch (const std::bad_alloc&) {
    return;
  }
  bin.resize(bin.size() - count);
  lane.free_bytes -= count * size.bytes;
  lane.front.free_bytes += count * size.bytes;
  lane.front.known_free_bytes += count * size.bytes;
}

inline void Pool::drain(Lane& lane) noexcept {
  Front& front = lane.front;
  std::scoped_lock lock(front.lock);
  if (front.untouched()) return;
  used_bytes_ += front.known_free_bytes - front.free_bytes;  // wraps and comes back: a free may arrive before its allocation
  for (std::size_t index = 0; index < front.bin_count; ++index) {
    BlockStack& bin = front.bins[index];
    if (bin.empty()) continue;
    const std::size_t bytes = bin.size() * process_.pages.find((*bin.begin())->start)->block_bytes;
    try {
      auto& into = lane.bin(static_cast<std::uint32_t>(index));
      into.insert(into.end(), bin.begin(), bin.end());
    } catch (const std::bad_alloc&) {
      continue;  // they stay in front, where their own stream finds them
    }
    bin.clear();
    front.free_bytes -= bytes;
    lane.free_bytes += bytes;
  }
  front.known_free_bytes = front.free_bytes;
  lane.live_count += static_cast<std::size_t>(front.live_delta);
  live_count_ += static_cast<std::size_t>(front.live_delta);
  asked_bytes_ += static_cast<std::size_t>(front.asked_delta);
  front.live_delta = front.asked_delta = 0;
}

inline void Pool::drain_all() noexcept {
  drain(lanes_.at(ready_lane(Side::cpu)));
  drain(lanes_.at(ready_lane(Side::gpu)));
  drain(lanes_.at(kFreshLane));
  lanes_.for_each_stream([&](Lane& lane) { drain(lane); });
}

// From here on the lane is the pool's alone, and its numbers are whole.
inline void Pool::close_front(Lane& lane) noexcept {
  {
    std::scoped_lock lock(lane.front.lock);
    lane.front.key.store(Front::kClosed, std::memory_order_release);
  }
  drain(lane);
}

}  // namespace rmm_bridge
