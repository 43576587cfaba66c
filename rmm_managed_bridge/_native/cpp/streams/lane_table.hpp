// The lanes of one pool. Not thread-safe: the pool's lock covers it. Makes no CUDA call.
#pragma once

#include <array>
#include <atomic>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "streams/lane.hpp"

namespace rmm_bridge {

// The first two lanes hold finished blocks, one for each side: anybody may have those. The third holds CPU blocks that
// were freed just now, while device work that nobody told of may still read them: see Pool::flush_fresh.
inline constexpr std::uint16_t ready_lane(Side side) { return side == Side::cpu ? 0 : 1; }
inline constexpr std::uint16_t kFreshLane = 2;
inline constexpr std::uint16_t kFirstStreamLane = 3;

class LaneTable {
 public:
  // `fronts`: whether what the CPU frees may be taken again without the pool's lock.
  explicit LaneTable(bool fronts) {
    for (std::uint16_t index = 0; index < kFirstStreamLane; ++index) {
      Lane& lane = add();
      if (fronts) lane.front.key.store(StreamRef::kHostKey);
    }
  }

  // Needs no lock for the number of a lane that a live block names: lanes never move, and chunks of them are only added.
  Lane& at(std::uint16_t index) noexcept {
    return chunks_[index / kChunk].load(std::memory_order_acquire)[index % kChunk];
  }
  std::size_t size() const noexcept { return count_; }

  // Whether any stream is held: without one, no device work is known of. Needs no lock.
  bool any_held() const noexcept { return held_.load(std::memory_order_relaxed) != 0; }

  Lane* find(std::uint64_t key) noexcept {
    if (key == last_key_) return &at(last_index_);
    auto found = by_key_.find(key);
    if (found == by_key_.end()) return nullptr;
    last_key_ = key;
    last_index_ = found->second;
    return &at(found->second);
  }

  // The lane of the held stream with this handle; null for the handles that mean another stream in each context or thread.
  Lane* find_held(CUstream handle) noexcept {
    auto found = by_handle_.find(handle);
    return found == by_handle_.end() ? nullptr : &at(found->second);
  }

  // Throws std::bad_alloc, also when 65,534 streams are named by live blocks at once.
  Lane& get(const StreamRef& stream) {
    if (Lane* lane = find(stream.key); lane != nullptr) return *lane;
    std::uint16_t index;
    if (!idle_.empty()) {
      index = idle_.back();
      by_key_.emplace(stream.key, index);
      idle_.pop_back();
    } else {
      if (count_ > std::numeric_limits<std::uint16_t>::max()) throw std::bad_alloc();
      idle_.reserve(count_ + 1);
      index = add().index;
      by_key_.emplace(stream.key, index);
    }
    Lane& lane = at(index);
    lane.stream = stream;
    // These two outlive every block: nobody destroys them.
    if (stream.legacy() || (stream.handle == CU_STREAM_PER_THREAD && stream.key != StreamRef::kUnseenKey)) own(lane);
    lane.in_use = true;
    return lane;
  }

  // From now on the lane's frees need no event.
  void own(Lane& lane) noexcept {
    if (!lane.owned) held_.fetch_add(1, std::memory_order_relaxed);
    lane.owned = true;
    if (!lane.stream.legacy() && lane.stream.handle != CU_STREAM_PER_THREAD) {
      try {
        by_handle_.insert_or_assign(lane.stream.handle, lane.index);
      } catch (const std::bad_alloc&) {  // then the driver is asked for its id
      }
    }
    std::scoped_lock lock(lane.front.lock);
    lane.front.key.store(lane.stream.key, std::memory_order_release);
  }

  // The stream's object is let go.
  void disown(Lane& lane) noexcept {
    if (lane.owned) {
      held_.fetch_sub(1, std::memory_order_relaxed);
      if (find_held(lane.stream.handle) == &lane) by_handle_.erase(lane.stream.handle);
    }
    lane.owned = false;
    lane.owner = nullptr;
  }

  // The stream is gone, or nothing of it is left: its number may stand for another one.
  void recycle(Lane& lane) noexcept {
    if (last_index_ == lane.index) last_key_ = StreamRef::kHostKey;
    by_key_.erase(lane.stream.key);
    disown(lane);
    lane.in_use = false;
    lane.events.clear();
    for (auto& bin : lane.bins) bin.clear();
    lane.free_bytes = 0;
    idle_.push_back(lane.index);
  }

  template <typename Visit>
  void for_each_stream(Visit visit) {
    for (std::size_t index = kFirstStreamLane; index < count_; ++index) {
      if (Lane& lane = at(static_cast<std::uint16_t>(index)); lane.in_use) visit(lane);
    }
  }

  template <typename Visit>
  void for_each_front(Visit visit) {
    for (std::size_t index = 0; index < count_; ++index) visit(at(static_cast<std::uint16_t>(index)).front);
  }

 private:
  static constexpr std::size_t kChunk = 256;

  Lane& add() {
    if (count_ % kChunk == 0) chunks_[count_ / kChunk].store(new Lane[kChunk], std::memory_order_release);
    Lane& lane = at(static_cast<std::uint16_t>(count_));
    lane.index = static_cast<std::uint16_t>(count_++);
    lane.home = this;
    return lane;
  }

  std::array<std::atomic<Lane*>, 65536 / kChunk> chunks_{};  // never freed: the hot path reads them without a lock
  std::size_t count_ = 0;
  std::atomic<int> held_{0};
  std::unordered_map<std::uint64_t, std::uint16_t> by_key_;
  std::unordered_map<CUstream, std::uint16_t> by_handle_;  // of held streams
  std::vector<std::uint16_t> idle_;
  std::uint64_t last_key_ = StreamRef::kHostKey;
  std::uint16_t last_index_ = 0;
};

}  // namespace rmm_bridge
