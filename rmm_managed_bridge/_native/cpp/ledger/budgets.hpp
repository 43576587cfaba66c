// Limits on what may be live under a tag. A tag and its budget never change once they are published, so that charging
// takes no lock; a tag inside another charges both. Standard library only.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

namespace rmm_bridge {

struct Budget {
  Budget* outer = nullptr;
  std::int64_t limit_bytes = 0;
  std::atomic<std::int64_t> live_bytes{0};
};

class Budgets {
 public:
  static constexpr std::uint32_t kTags = std::uint32_t{1} << 20;

  // Once for each tag, in rising order and under the caller's lock, before the tag is used. `limit_bytes` below 0: the
  // tag has the budget of the one it is inside of. False for a limit on a tag beyond the table. Throws std::bad_alloc.
  bool add(std::uint32_t tag, std::uint32_t outer, std::int64_t limit_bytes) {
    if (tag >= kTags) return limit_bytes < 0;
    Budget* budget = find(outer);
    if (budget == nullptr && limit_bytes < 0) return true;
    auto& chunk = chunks_[tag / kChunk];
    if (chunk.load(std::memory_order_relaxed) == nullptr) {
      chunk.store(new std::array<std::atomic<Budget*>, kChunk>{}, std::memory_order_release);
    }
    if (limit_bytes >= 0) {
      auto fresh = std::make_unique<Budget>();
      fresh->outer = budget;
      fresh->limit_bytes = limit_bytes;
      budget = fresh.release();  // tags live as long as the process
    }
    (*chunk.load())[tag % kChunk].store(budget, std::memory_order_release);
    any_.store(true, std::memory_order_release);
    return true;
  }

  // In a forked child: nothing is live under any tag.
  void forget() noexcept {
    for (const auto& each : chunks_) {
      const auto* chunk = each.load(std::memory_order_acquire);
      for (std::uint32_t tag = 0; chunk != nullptr && tag < kChunk; ++tag) {
        if (Budget* budget = (*chunk)[tag].load(std::memory_order_acquire); budget != nullptr) budget->live_bytes.store(0);
      }
    }
  }

  bool any() const noexcept { return any_.load(std::memory_order_relaxed); }

  // The innermost budget that a tag charges, or null.
  Budget* find(std::uint32_t tag) const noexcept {
    if (tag == 0 || tag >= kTags) return nullptr;
    const auto* chunk = chunks_[tag / kChunk].load(std::memory_order_acquire);
    return chunk == nullptr ? nullptr : (*chunk)[tag % kChunk].load(std::memory_order_acquire);
  }

  // False, and nothing is charged, if a limit would be passed. Giving back (`bytes` below 0) always works.
  bool charge(std::uint32_t tag, std::int64_t bytes) noexcept {
    Budget* const innermost = find(tag);
    for (Budget* budget = innermost; budget != nullptr; budget = budget->outer) {
      const std::int64_t before = budget->live_bytes.fetch_add(bytes, std::memory_order_relaxed);
      if (bytes <= 0 || bytes <= budget->limit_bytes - before) continue;
      for (Budget* charged = innermost;; charged = charged->outer) {
        charged->live_bytes.fetch_sub(bytes, std::memory_order_relaxed);
        if (charged == budget) return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::uint32_t kChunk = 1024;
  std::array<std::atomic<std::array<std::atomic<Budget*>, kChunk>*>, kTags / kChunk> chunks_{};
  std::atomic<bool> any_{false};
};

}  // namespace rmm_bridge
