// What went wrong where nothing can be raised: kept until Python puts it into words and warns.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "base/spin_lock.hpp"
#include "ledger/ledger.hpp"

namespace rmm_bridge {

struct PendingWarning {
  enum class Kind : int {
    quarantine_full,     // device work that does not end keeps blocks from being used again
    written_before,      // debug mode: bytes in front of a block were changed,
    written_behind,      // or behind it,
    written_after_free,  // or in it, after it was freed
  };
  Kind kind;
  std::size_t bytes = 0;      // what the quarantine holds; of the block
  std::ptrdiff_t offset = 0;  // of the first changed byte, from the start of the block
  HolderKey who;
  Entry entry;
};

class PendingWarnings {
 public:
  SpinLock& lock_for_fork() noexcept { return lock_; }

  // False if it could only be counted.
  bool add(const PendingWarning& warning) noexcept {
    std::scoped_lock lock(lock_);
    if (warning.kind != PendingWarning::Kind::quarantine_full) ++damaged_count_;
    try {
      if (pending_.size() < kMost) pending_.push_back(warning);
    } catch (...) {
      return false;
    }
    return true;
  }

  std::vector<PendingWarning> take() noexcept {
    std::scoped_lock lock(lock_);
    return std::exchange(pending_, {});
  }

  std::uint64_t damaged_count() noexcept {
    std::scoped_lock lock(lock_);
    return damaged_count_;
  }

 private:
  static constexpr std::size_t kMost = 100;  // a program that writes past every block needs no more to be told
  SpinLock lock_;
  std::vector<PendingWarning> pending_;
  std::uint64_t damaged_count_ = 0;
};

}  // namespace rmm_bridge
