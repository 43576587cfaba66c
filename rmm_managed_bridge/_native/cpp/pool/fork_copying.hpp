// One fork's copies: which blocks the CPU uses, what is waited for, and how the bytes come to the mirror (docs/design/fork.md).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "pool/fork_copy.hpp"

namespace rmm_bridge {

// A block that the CPU uses.
struct ForkUse {
  TrackedPool* pool;
  const Block* block;
  std::uintptr_t low, high;
  bool device;  // device work may have used it last: its pages may lie there
};

// With the gate closed what a live block lies in stays mapped. Throws std::bad_alloc.
void collect_for_fork(Process& process, std::vector<ForkUse>& uses, ForkReport& report);

// Bytes that one thread copies.
struct ForkItem {
  const char* from;
  char* to;
  std::size_t bytes;
  bool known;
};

class ForkCopying {
 public:
  ForkCopying(Process& process, ForkReport& report) : process_(process), mirror_(process.forks.mirror), report_(report) {}

  // The device work on the blocks, until `until`: those whose work has ended are in `ready`.
  void wait(const std::vector<ForkUse>& uses, std::chrono::steady_clock::time_point until);
  // From where their pages are, which they stay.
  bool copy_from_devices();
  // All others, and an end of it.
  bool copy(std::vector<ForkUse>& uses);

  // The blocks that were left out, in order.
  std::vector<std::uintptr_t> left_out() const {
    std::vector<std::uintptr_t> blocks(left_out_.begin(), left_out_.end());
    std::ranges::sort(blocks);
    return blocks;
  }
  bool any_ready() const noexcept { return !ready_.empty(); }

 private:
  struct Pending {
    ForkUse use;
    std::vector<EventRef> events;
  };
  void leave_out(const ForkUse& use, ForkReport::Why why);
  char* staging(CUcontext context);
  std::vector<std::uintptr_t> fetch(TrackedPool& pool, const std::vector<ForkUse>& uses);
  CUstream stream_of(TrackedPool& pool);
  bool finish(TrackedPool& pool, CUstream stream);
  void run(const std::vector<ForkItem>& items) noexcept;

  Process& process_;
  ForkMirror& mirror_;
  ForkReport& report_;
  std::unordered_map<std::uintptr_t, ForkUse> ready_;  // by address
  std::unordered_set<std::uintptr_t> left_out_;
};

}  // namespace rmm_bridge
