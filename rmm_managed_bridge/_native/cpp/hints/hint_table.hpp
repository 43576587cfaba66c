// What was asked of the driver about live blocks: advice, which ends with its block, and the last placement.
//
// Advice belongs to pages and blocks do not: small neighbours share the pages at their edges. A page keeps advice for as
// long as any advised block lies on it. So the block that ends first leaves the shared page alone, and what it had set
// there is undone with the neighbour. Standard library only; no call to the driver is made here.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

#include "base/spin_lock.hpp"

namespace rmm_bridge {

struct Hinted {
  static constexpr std::uint8_t kReadMostly = 1;
  static constexpr std::uint8_t kPreferred = 2;
  static constexpr std::int16_t kNowhere = -2;  // never asked
  static constexpr unsigned kCpuBit = 63;

  std::uintptr_t low = 0, high = 0;   // the pages that were advised: one range over all advice of the block
  std::uint64_t accessors = 0;        // devices by number, and the CPU as kCpuBit
  std::uint8_t advice = 0;            // kReadMostly, kPreferred
  std::int16_t placement = kNowhere;  // device number, or -1 for the CPU

  bool advised() const noexcept { return advice != 0 || accessors != 0; }
};

// Blocks that RMM and PyTorch make, perhaps without the GIL, so that no policy in Python can be asked about them: from which size
// on what `install` was told has them prefetched, and what became of it.
struct NewBlocks {
  enum Outcome : std::uint8_t {
    done,
    host,
    not_managed,
    no_concurrent_access,
    capturing,
    larger_than_device,
    refused,
    kOutcomes
  };

  std::atomic<std::size_t> least_bytes{~std::size_t{0}};  // no block is that large: none is prefetched
  std::array<std::atomic<std::uint64_t>, kOutcomes> counts{};
};

class HintTable {
 public:
  SpinLock& lock_for_fork() noexcept { return lock_; }

  // Before the driver is asked, so that a block that is freed in between loses advice that it may have got.
  // Throws std::bad_alloc.
  void advise(std::uintptr_t start, std::uintptr_t low, std::uintptr_t high, std::uint8_t advice, std::uint64_t accessors) {
    std::scoped_lock lock(lock_);
    Hinted& block = blocks_[start];
    block.low = block.advised() ? std::min(block.low, low) : low;
    block.high = block.advised() ? std::max(block.high, high) : high;
    block.advice |= advice;
    block.accessors |= accessors;
  }

  // After the driver took advice back. Counts if that was for all pages that had it; else there is more to undo later.
  void take_back(std::uintptr_t start, std::uintptr_t low, std::uintptr_t high, std::uint8_t advice,
                 std::uint64_t accessors) noexcept {
    std::scoped_lock lock(lock_);
    auto found = blocks_.find(start);
    if (found == blocks_.end() || low > found->second.low || high < found->second.high) return;
    found->second.advice &= static_cast<std::uint8_t>(~advice);
    found->second.accessors &= ~accessors;
  }

  // Throws std::bad_alloc.
  void place(std::uintptr_t start, std::int16_t placement) {
    std::scoped_lock lock(lock_);
    blocks_[start].placement = placement;
  }

  Hinted read(std::uintptr_t start) noexcept {
    std::scoped_lock lock(lock_);
    auto found = blocks_.find(start);
    return found == blocks_.end() ? Hinted{} : found->second;
  }

  // Forgets the block and returns the advice to undo, on the pages that no other advised block lies on. The range is empty
  // where there is nothing to undo.
  Hinted end(std::uintptr_t start) noexcept {
    std::scoped_lock lock(lock_);
    auto found = blocks_.find(start);
    if (found == blocks_.end()) return {};
    Hinted ended = found->second;
    if (ended.advised()) {
      // Blocks are disjoint, so others reach into the first and the last page at most: those that start on the first
      // page, the one before it, and those that start before the end of the last page.
      auto first = found;
      while (first != blocks_.begin() && first->first >= ended.low) --first;
      const std::uintptr_t low = ended.low, high = ended.high;
      for (auto it = first; it != blocks_.end() && it->first < high; ++it) {
        Hinted& other = it->second;
        if (it == found || !other.advised() || other.low >= high || other.high <= low) continue;
        if (other.low <= low) ended.low = std::max(ended.low, std::min(other.high, high));
        if (other.high >= high) ended.high = std::min(ended.high, std::max(other.low, low));
        other.advice |= ended.advice;
        other.accessors |= ended.accessors;
      }
    }
    blocks_.erase(found);
    if (!ended.advised() || ended.low >= ended.high) ended.low = ended.high = 0;
    return ended;
  }

  std::size_t size() noexcept {
    std::scoped_lock lock(lock_);
    return blocks_.size();
  }

 private:
  SpinLock lock_;
  std::map<std::uintptr_t, Hinted> blocks_;
};

}  // namespace rmm_bridge
