// The lanes of one pool. Not thread-safe: the pool's lock covers it. Makes no CUDA call.
#pragma once

#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

#include "order.hpp"

namespace rmm_bridge {

// The first two lanes hold finished blocks, one for each side: anybody may have those.
inline constexpr std::uint16_t ready_lane(Side side) { return side == Side::cpu ? 0 : 1; }
inline constexpr std::uint16_t kFirstStreamLane = 2;

class LaneTable {
 public:
  LaneTable() {
    for (std::uint16_t index = 0; index < kFirstStreamLane; ++index) {
      lanes_.push_back(std::make_unique<Lane>());
      lanes_.back()->index = index;
    }
  }

  Lane& at(std::uint16_t index) noexcept { return *lanes_[index]; }
  std::size_t size() const noexcept { return lanes_.size(); }

  Lane* find(std::uint64_t key) noexcept {
    if (key == last_key_) return lanes_[last_index_].get();
    auto found = by_key_.find(key);
    if (found == by_key_.end()) return nullptr;
    last_key_ = key;
    last_index_ = found->second;
    return lanes_[found->second].get();
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
      if (lanes_.size() > std::numeric_limits<std::uint16_t>::max()) throw std::bad_alloc();
      idle_.reserve(lanes_.size() + 1);
      lanes_.push_back(std::make_unique<Lane>());
      index = static_cast<std::uint16_t>(lanes_.size() - 1);
      lanes_[index]->index = index;
      by_key_.emplace(stream.key, index);
    }
    Lane& lane = *lanes_[index];
    lane.stream = stream;
    // These two outlive every block: nobody destroys them.
    lane.owned = stream.legacy() || stream.handle == CU_STREAM_PER_THREAD;
    lane.in_use = true;
    return lane;
  }

  // The stream is gone, or nothing of it is left: its number may stand for another one.
  void recycle(Lane& lane) noexcept {
    if (last_index_ == lane.index) last_key_ = StreamRef::kHostKey;
    by_key_.erase(lane.stream.key);
    lane.in_use = lane.owned = false;
    lane.owner = nullptr;
    lane.events.clear();
    for (auto& bin : lane.bins) bin.clear();
    lane.free_bytes = 0;
    idle_.push_back(lane.index);
  }

  template <typename Visit>
  void for_each_stream(Visit visit) {
    for (std::size_t index = kFirstStreamLane; index < lanes_.size(); ++index) {
      if (lanes_[index]->in_use) visit(*lanes_[index]);
    }
  }

 private:
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::unordered_map<std::uint64_t, std::uint16_t> by_key_;
  std::vector<std::uint16_t> idle_;
  std::uint64_t last_key_ = StreamRef::kHostKey;
  std::uint16_t last_index_ = 0;
};

}  // namespace rmm_bridge
