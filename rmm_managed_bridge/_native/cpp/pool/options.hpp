// What a pool is told and what it answers.
#pragma once

#include <chrono>
#include <cstddef>
#include <limits>

#include "pages/fresh_pages.hpp"
#include "pages/hugepages.hpp"
#include "pages/span.hpp"
#include "pool/pool_budget.hpp"

namespace rmm_bridge {

enum class Refusal : int {
  none,
  out_of_memory,
  capturing,      // the stream is being captured: managed memory cannot be had on it now
  bad_stream,     // the driver does not know the stream, or a call on it failed
  other_device,   // the stream is one of another device
  over_budget,    // the tag's limit would be passed
  timed_out,      // what freed blocks wait for has not ended for `wait_timeout`: see Pool::stalled
  host_function,  // on a thread that runs a CUDA host function nothing is waited for, and no memory can be taken
  unheld_stream,  // the block was used on a stream whose object nobody gave us: its work cannot be waited for
};

struct Grant {
  char* ptr = nullptr;
  Block* block = nullptr;
  bool zeroed = false;
  bool held = true;  // the bridge holds the stream's object, or need not: see Pool::hold
  Advice advice;     // still to be given for its memory: see Pool::Advising
  FreshPages fresh;  // that nobody has populated yet: see TrackedPool::populate
};

// What a pool is told when it is made. The defaults bound nothing.
struct PoolOptions {
  static constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
  std::size_t limit_bytes = kNoLimit;              // of what is reserved from upstream
  std::size_t release_threshold_bytes = kNoLimit;  // more than this is not kept cached
  std::size_t quarantine_limit_bytes = kNoLimit;   // more than this, and an allocation waits a while before it grows
  std::chrono::milliseconds patience{1000};        // that while, and how long a refusal waits for what others have in hand
  // An allocation that cannot be served otherwise waits for freed blocks as long as any of the work that they wait for ends this often.
  std::chrono::milliseconds wait_timeout{60'000};
  // No more is reserved than twice what was live lately, and a little: see pool_budget.hpp. `release_threshold_bytes` takes its place.
  bool budget = false;
  std::size_t least_budget_bytes = 0;
  std::size_t spare_bytes = PoolBudget::kSpareBytes;
  std::chrono::milliseconds recent{0};  // a period of the budget's; 0: as the kind of memory has it
  bool counts_asked = true;             // frees say what was asked for, as they do where there is a ledger
  // Every stream whose object the bridge holds counts as one that may touch a block the CPU used, or a view showed.
  bool cautious = true;
  bool debug = false;        // see debug.cpp
  bool hugepages = false;    // large CPU blocks are advised to use huge pages
  bool populate = false;     // pages that a block of a device is the first to have are prefetched to it
  bool device_wait = false;  // the device shares no page with the CPU while it is busy: `synchronize` waits for all of it
};

struct PoolNumbers {
  std::size_t reserved_bytes = 0;
  std::size_t used_bytes = 0;
  std::size_t asked_bytes = 0;  // in a pool without a ledger not a number
  std::size_t quarantined_bytes = 0;
  std::size_t largest_free_bytes = 0;
  std::size_t lane_count = 0;
  std::size_t slab_free_bytes = 0;  // free, but in slabs and lanes: memory goes back as whole spans
  std::size_t pinned_bytes = 0;     // free, but in pieces that go back as a whole and have live blocks
};

}  // namespace rmm_bridge
