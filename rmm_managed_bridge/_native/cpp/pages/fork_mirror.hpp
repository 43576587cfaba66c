// Copies of pages of managed memory, which forked children find at the same addresses: the kernel gives a child nothing where managed
// memory lies. docs/design/fork.md has the reasons.
//
// By tiles of a huge page, each with a copy of its own that lies alike within a huge page, so that moving it is moving a page table.
// A child moves the copies to where the pages were. That changes the child's address space alone: the parent keeps its copies, and both
// share them until one of them writes.
//
// Threads: one at a time prepares, as whoever calls it sees to. The lock is held around a fork, and while what a child reads changes.
#pragma once

#include <unistd.h>

#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "base/spin_lock.hpp"
#include "pages/kernel.hpp"
#include "pages/page_map.hpp"

namespace rmm_bridge {

class ForkMirror {
 public:
  explicit ForkMirror(const Kernel& kernel = {}) : kernel_(kernel) {}

  const std::uintptr_t page_bytes = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));

  // --- in the parent, by the one that prepares ---

  // From here on the pages are named that children shall have.
  void begin() noexcept;
  // Each page that has any byte of the range. Throws std::bad_alloc.
  void want(std::uintptr_t low, std::uintptr_t high);
  std::size_t wanted_bytes() const noexcept;
  // Memory for the copies of all that is wanted. False if the kernel has none.
  bool make_room() noexcept;

  // A part of a wanted range whose copy lies in one piece.
  struct Part {
    char* copy = nullptr;
    std::size_t bytes = 0;
    bool known = false;  // it holds what the pages had at an earlier fork
  };
  // The longest from `low` on, up to `high` and to the end of its tile, that is known throughout or not at all.
  Part part(std::uintptr_t low, std::uintptr_t high) const noexcept;

  // All that is wanted is copied: children find it, until `end`. What is not wanted any more is let go.
  void show() noexcept;
  // It comes to nothing, or the fork is over: the copies that there are stay for the next one.
  void end() noexcept;
  void drop() noexcept;
  bool empty() const noexcept { return empty_.load(std::memory_order_relaxed); }

  // --- in the child, before it has a second thread: makes system calls and nothing else ---

  void place() noexcept;
  // How many bytes from `low` on, up to `high`, the process has from its parent in pages that were placed.
  std::size_t placed_bytes(std::uintptr_t low, std::uintptr_t high) const noexcept;

  SpinLock& lock_for_fork() noexcept { return lock_; }

 private:
  static constexpr std::size_t kMostPages = kHugePage / 4096;
  using Pages = std::bitset<kMostPages>;
  struct Tile {
    char* copy = nullptr;
    std::uint32_t mapping = 0;  // copies of one number may lie in one mapping of the kernel's
    bool huge = false;
    Pages known, wanted;
  };
  using Tiles = std::map<std::uintptr_t, Tile>;  // by address, in huge pages

  struct Run {
    std::uintptr_t low = 0;
    char* copy = nullptr;
    std::size_t bytes = 0;
  };
  void move(const Run& run) noexcept;
  void unmap(Tile& tile) noexcept;

  const Kernel kernel_;
  SpinLock lock_;
  Tiles tiles_;
  Tiles placed_;  // in a child
  bool shown_ = false;
  std::uint32_t mappings_ = 0;
  std::atomic<bool> empty_{true};
};

}  // namespace rmm_bridge
