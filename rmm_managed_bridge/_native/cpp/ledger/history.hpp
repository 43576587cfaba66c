// The newest events, bounded, and how many older ones were dropped. Standard library only.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/spin_lock.hpp"
#include "ledger/ledger.hpp"

namespace rmm_bridge {

enum class Action : std::uint8_t { allocate, deallocate, resize, failure, foreign_free, size_mismatch, damage };

struct HistoryEvent {
  Action action;
  HolderKey who;
  Entry entry;
  std::uint64_t stated_bytes = 0;
};

class History {
 public:
  SpinLock& lock_for_fork() noexcept { return lock_; }

  void set_limit(std::size_t limit) {
    std::scoped_lock lock(lock_);
    std::vector<HistoryEvent> kept = ordered();
    if (kept.size() > limit) {
      dropped_ += kept.size() - limit;
      kept.erase(kept.begin(), kept.end() - static_cast<std::ptrdiff_t>(limit));
    }
    kept.reserve(limit);
    ring_ = std::move(kept);
    next_ = 0;
    limit_ = limit;
  }

  // Never throws: the ring has its memory from `set_limit` on.
  void add(const HistoryEvent& event) noexcept {
    std::scoped_lock lock(lock_);
    if (limit_ == 0) {
      ++dropped_;
    } else if (ring_.size() < limit_) {
      ring_.push_back(event);
    } else {
      ring_[next_] = event;
      next_ = (next_ + 1) % limit_;
      ++dropped_;
    }
  }

  // In a forked child.
  void forget() noexcept {
    std::scoped_lock lock(lock_);
    ring_.clear();
    next_ = 0;
    dropped_ = 0;
  }

  // Oldest first.
  std::vector<HistoryEvent> copy(std::uint64_t& dropped) {
    std::scoped_lock lock(lock_);
    dropped = dropped_;
    return ordered();
  }

 private:
  std::vector<HistoryEvent> ordered() const {
    std::vector<HistoryEvent> events(ring_.begin() + static_cast<std::ptrdiff_t>(next_), ring_.end());
    events.insert(events.end(), ring_.begin(), ring_.begin() + static_cast<std::ptrdiff_t>(next_));
    return events;
  }

  SpinLock lock_;
  std::vector<HistoryEvent> ring_;
  std::size_t next_ = 0;
  std::size_t limit_ = 0;
  std::uint64_t dropped_ = 0;
};

}  // namespace rmm_bridge
