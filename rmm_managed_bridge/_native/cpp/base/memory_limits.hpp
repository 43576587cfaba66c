// How much memory the kernel lets this process have, and how many processors: its control groups, of version 1 and 2, and `ulimit`. Standard library and
// the kernel's files only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/spin_lock.hpp"

namespace rmm_bridge {

// From any thread, and the files are read with no lock held. They are read anew each time: limits change while programs run.
class MemoryLimits {
 public:
  static constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();

  enum class Who : int { nobody, group, address_space, data_segment };
  struct Limit {
    std::uint64_t bytes = kNone;
    Who who = Who::nobody;
    std::string file;  // of a group: the one that says so
  };

  // Looks up the groups of this process. `proc` and `groups` stand for /proc and /sys/fs/cgroup. Throws std::bad_alloc.
  void find(const std::string& proc, const std::string& groups);

  // The smallest limit there is, and who set it. Throws std::bad_alloc.
  Limit smallest() const;

  // Whether a group had a limit when it was looked up: else there is nothing to look at.
  bool limited() const noexcept { return limited_.load(std::memory_order_relaxed); }

  // How many threads can run at once: what this one is bound to, and what its groups let it have. At least one.
  std::size_t processors() const noexcept;

  struct Pressure {
    // So much should go back before the kernel ends somebody: by so much this process, and whoever shares its groups, is nearer
    // to the end of a group's memory than is safe.
    std::uint64_t excess_bytes = 0;
    bool near = false;  // look again soon
  };
  // None where nothing can be read. For a tick: some 10 us.
  Pressure look() noexcept;

  SpinLock& lock_for_fork() const noexcept { return lock_; }

 private:
  // One group, of the process or around it.
  struct Group {
    std::string folder;
    bool unified = false;  // version 2
  };
  std::vector<Group> groups() const;
  static std::vector<Group> groups_of(const std::string& proc, const std::string& groups, std::string_view controller);
  static std::uint64_t processors_of(const Group& group);
  static std::uint64_t events_of(const std::vector<Group>& groups);

  mutable SpinLock lock_;
  std::vector<Group> groups_;  // innermost first
  std::atomic<bool> limited_{false};
  std::atomic<std::uint64_t> most_processors_{kNone};  // of the groups
  std::atomic<std::uint64_t> seen_events_{0};
  std::atomic<std::int64_t> heed_until_ns_{0};  // for a while after the kernel has noted something
};

}  // namespace rmm_bridge
