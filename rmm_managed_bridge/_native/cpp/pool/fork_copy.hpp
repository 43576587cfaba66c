// What a forked child shall find of the arrays that the CPU uses is copied before the fork. docs/design/fork.md has the reasons.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

struct ForkOptions {
  std::uint64_t limit_bytes = 0;
  std::chrono::milliseconds patience{1000};  // for device work
  std::chrono::milliseconds keep{5000};      // so long the copies stay for the next fork
};

struct ForkReport {
  enum class Outcome : int {
    nothing,    // no block that the CPU uses
    copied,     // children find all that was not left out
    too_large,  // more than the limit, and no child finds anything
    no_memory,  // likewise
    busy,       // another thread's fork, or a piece on its way back, takes too long: likewise
  };
  enum class Why : int { nothing, not_finished, capturing, unheld_stream, driver, exclusive };
  Outcome outcome = Outcome::nothing;
  std::size_t block_count = 0, block_bytes = 0;        // that the CPU uses
  std::size_t copied_bytes = 0;                        // the rest is as it was at the fork before
  std::size_t left_out_count = 0, left_out_bytes = 0;  // of those blocks
  std::uintptr_t left_out = 0;                         // the first of them
  Why why = Why::nothing;                              // of that one
  std::int64_t time_ns = 0;
};

// Before a fork that Python makes, with the GIL: waits for device work and copies from devices without it, then copies with it, so that no
// thread of Python's changes what is copied before the fork. `end_fork` has to follow in the parent, on the same thread.
ForkReport copy_for_fork(Process* process, const ForkOptions& options) noexcept;
void end_fork(Process* process, std::chrono::milliseconds keep) noexcept;

// In a forked child: how many bytes from the start of a block of the parent's managed memory it has, up to `bytes`. A page that it has
// may hold other blocks, which it has not.
std::size_t inherited_bytes(Process& process, const TrackedPool::Found& found, std::size_t bytes) noexcept;
// Whether such bytes were left behind. False for any other address.
bool lost_in_fork(Process* process, const void* ptr, std::size_t bytes) noexcept;

}  // namespace rmm_bridge
