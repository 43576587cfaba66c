// Pool, the part about fronts that takes the pool's lock: filling them, and taking back what is in them.
#include "pool/front.hpp"

namespace rmm_bridge {

namespace {
constexpr std::size_t kRefill = 64;
}  // namespace

// Lets the next requests of the class be served in front. They would drain it only to come here again.
void Pool::refill(Lane& lane, const SizeClass& size) noexcept {
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

void Pool::drain(Lane& lane) noexcept {
  Front& front = lane.front;
  std::scoped_lock lock(front.lock);
  if (!front.untouched()) drain(lane, 0, front.bin_count);
}

// What is of other classes stays, for whoever asks for those next: programs take turns between a few, and would find the front empty
// each time.
void Pool::drain(Lane& lane, const SizeClass& size) noexcept {
  Front& front = lane.front;
  std::scoped_lock lock(front.lock);
  if (!front.untouched()) drain(lane, size.index, std::min(front.bin_count, size.index + 1));
}

// Under the front's lock, too.
void Pool::drain(Lane& lane, std::uint32_t first, std::uint32_t end) noexcept {
  Front& front = lane.front;
  used_bytes_ += front.known_free_bytes - front.free_bytes;  // wraps and comes back: a free may arrive before its allocation
  for (std::uint32_t index = first; index < end; ++index) {
    BlockStack& bin = front.bins[index];
    if (bin.empty()) continue;
    const std::size_t bytes = bin.size() * process_.pages.find((*bin.begin())->start)->block_bytes;
    try {
      auto& into = lane.bin(index);
      into.insert(into.end(), bin.begin(), bin.end());
    } catch (const std::bad_alloc&) {
      continue;  // they stay in front, where their own stream finds them
    }
    bin.clear();
    front.free_bytes -= bytes;
    lane.free_bytes += bytes;
    front.drained_bytes += bytes;
  }
  front.drained_count -= front.live_delta;
  front.known_free_bytes = front.free_bytes;
  lane.named_count += static_cast<std::size_t>(front.live_delta);
  live_count_ += static_cast<std::size_t>(front.live_delta);
  asked_bytes_ += static_cast<std::size_t>(front.asked_delta);
  front.live_delta = front.asked_delta = 0;
}

void Pool::drain_all() noexcept {
  drain(lanes_.at(ready_lane(Side::cpu)));
  drain(lanes_.at(ready_lane(Side::gpu)));
  drain(lanes_.at(kDeferredLane));
  lanes_.for_each_stream([&](Lane& lane) { drain(lane); });
}

// From here on the lane is the pool's alone, and its numbers are whole.
void Pool::close_front(Lane& lane) noexcept {
  {
    std::scoped_lock lock(lane.front.lock);
    lane.front.key.store(Front::kClosed, std::memory_order_release);
  }
  drain(lane);
}

}  // namespace rmm_bridge
