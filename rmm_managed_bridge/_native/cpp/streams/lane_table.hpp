// The lanes of one pool. Not thread-safe: the pool's lock covers it. Makes no CUDA call.
#pragma once

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/clock.hpp"
#include "streams/lane.hpp"

namespace rmm_bridge {

// The first two lanes hold finished blocks, one for each side: anybody may have those. The third holds CPU blocks that
// were freed just now, while device work that nobody told of may still read them: see Pool::flush_deferred.
inline constexpr std::uint16_t ready_lane(Side side) { return side == Side::cpu ? 0 : 1; }
inline constexpr std::uint16_t kDeferredLane = 2;
inline constexpr std::uint16_t kFirstStreamLane = 3;

class LaneTable {
 public:
  // `fronts`: whether what the CPU frees may be taken again without the pool's lock.
  explicit LaneTable(bool fronts);

  // Needs no lock for the number of a lane that a live block names: lanes never move, and chunks of them are only added.
  Lane& at(std::uint16_t index) noexcept { return chunks_[index / kChunk].load(std::memory_order_acquire)[index % kChunk]; }
  std::size_t size() const noexcept { return count_; }

  // Whether there is a stream whose work may touch what nobody told of: one that is held, or was let go with work unfinished.
  // Needs no lock.
  bool any_work() const noexcept { return working_count_.load(std::memory_order_relaxed) != 0; }

  Lane* find(std::uint64_t key) noexcept;

  // The lane of the held stream with this handle; null for the handles that mean another stream in each context or thread.
  Lane* find_held(CUstream handle) noexcept {
    auto found = by_handle_.find(handle);
    return found == by_handle_.end() ? nullptr : &at(found->second);
  }

  // Throws std::bad_alloc, also when 65,533 streams are named by live blocks at once.
  Lane& get(const StreamRef& stream);

  // From now on the lane's frees need no event.
  void hold(Lane& lane) noexcept;

  // The front takes blocks again that `Pool::close_front` had closed.
  void open_front(Lane& lane) noexcept;

  // The stream's object is let go; returns it. `departure`: behind all its work, or null if there is none to be had.
  void* let_go(Lane& lane, EventRef departure) noexcept;

  // The stream takes part in this capture, or in none if it is 0.
  void note_capture(Lane& lane, std::uint64_t capture) noexcept {
    if (lane.capture == capture) return;
    capturing_count_.fetch_add((capture != 0) - (lane.capture != 0), std::memory_order_relaxed);
    lane.capture = capture;
    lane.capture_seen_ns = coarse_time_ns();
  }
  // Whether a block that was made then is younger than this capture, in which the stream is. By the clock that blocks have, and that
  // people set: if that was done since the table was made, nobody knows, and by how much less that is not noticed is the margin.
  static constexpr std::int64_t kClockNoise = 10'000'000, kMargin = 2 * kClockNoise;
  bool is_younger(const Lane& lane, std::uint64_t capture, std::int64_t born_ns) const noexcept {
    const bool as_it_was = std::abs(coarse_time_ns() - steady_time_ns() - clock_ns_) < kClockNoise;
    return lane.capture == capture && born_ns > lane.capture_seen_ns + kMargin && as_it_was;
  }
  // Whether a stream was last seen to be captured. Needs no lock.
  bool any_capture() const noexcept { return capturing_count_.load(std::memory_order_relaxed) != 0; }

  // The work of a stream that was let go has ended.
  void forget_departure(Lane& lane) noexcept {
    if (lane.departure == nullptr) return;
    lane.departure = nullptr;
    working_count_.fetch_sub(1, std::memory_order_relaxed);
  }

  // The stream is gone, or nothing of it is left: its number may stand for another one.
  void recycle(Lane& lane) noexcept;

  template <typename Visit>
  void for_each_stream(Visit visit) {
    for (std::size_t index = kFirstStreamLane; index < count_; ++index) {
      if (Lane& lane = at(static_cast<std::uint16_t>(index)); lane.in_use()) visit(lane);
    }
  }

  template <typename Visit>
  void for_each_front(Visit visit) {
    for (std::size_t index = 0; index < count_; ++index) visit(at(static_cast<std::uint16_t>(index)).front);
  }

 private:
  static constexpr std::size_t kChunk = 64;  // 20 KiB, which stay of each pool

  Lane& add();
  void unhold(Lane& lane) noexcept;

  std::array<std::atomic<Lane*>, 65536 / kChunk> chunks_{};  // never freed: the hot path reads them without a lock
  std::size_t count_ = 0;
  std::atomic<int> working_count_{0}, capturing_count_{0};
  const std::int64_t clock_ns_ = coarse_time_ns() - steady_time_ns();
  std::unordered_map<std::uint64_t, std::uint16_t> by_key_;
  std::unordered_map<CUstream, std::uint16_t> by_handle_;  // of held streams
  std::vector<std::uint16_t> idle_;
  std::uint64_t last_key_ = StreamRef::kHostKey;
  std::uint16_t last_index_ = 0;
};

}  // namespace rmm_bridge
