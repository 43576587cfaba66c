// How much a pool keeps: twice the recent peak of what is live, and a little. Made of numbers alone: whoever holds it tells what is live
// and what time it is. Not thread-safe: the pool's lock covers it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace rmm_bridge {

class PoolBudget {
 public:
  // What each costs where it is another: docs/design/pool.md.
  static constexpr std::size_t kFactor = 2;
  static constexpr std::size_t kSpareBytes = std::size_t{64} << 20;
  static constexpr std::int64_t kHostPeriodNs = 5'000'000'000, kDevicePeriodNs = 15'000'000'000;

  explicit PoolBudget(std::int64_t period_ns, std::size_t spare_bytes = kSpareBytes) noexcept
      : period_ns_(period_ns), spare_bytes_(spare_bytes) {}

  void note(std::size_t live_bytes) noexcept { running_ = std::max(running_, live_bytes); }

  // The clock is asked only here: before growth, and by the bridge's thread. If nobody came for long, the period was that long.
  void roll(std::int64_t now_ns, std::size_t live_bytes) noexcept {
    if (began_ns_ == kNever) began_ns_ = now_ns;
    if (now_ns - began_ns_ >= period_ns_) {
      last_ = running_;
      running_ = 0;
      began_ns_ = now_ns;
    }
    note(live_bytes);
  }

  // What may be reserved while so much is live, or is about to be.
  std::size_t bytes(std::size_t live_bytes) const noexcept {
    const std::size_t recent = std::max({live_bytes, running_, last_});
    constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
    return recent > (kMost - spare_bytes_) / kFactor ? kMost : kFactor * recent + spare_bytes_;
  }

 private:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::min();
  std::int64_t period_ns_;
  std::size_t spare_bytes_;
  std::int64_t began_ns_ = kNever;
  std::size_t running_ = 0, last_ = 0;  // the most that was live in this period, and in the one before
};

}  // namespace rmm_bridge
