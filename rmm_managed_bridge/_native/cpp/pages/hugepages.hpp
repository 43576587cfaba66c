// Advice to back large host blocks with huge pages, as NumPy gives it for its own memory: which parts of a chunk carry
// it, and the calls. Advice is noted under the pool's lock and given after it.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace rmm_bridge {

// On x86-64, and on aarch64 with pages of 4 KiB. With larger base pages advice for 2 MiB is as good: the kernel takes
// what it can.
inline constexpr std::size_t kHugePage = std::size_t{2} << 20;
inline constexpr std::size_t kLeastAdvised = std::size_t{4} << 20;  // NumPy's own threshold

// A call to be made once no lock is held; none for no bytes.
struct Advice {
  char* base = nullptr;
  std::size_t bytes = 0;
  bool huge = false;
};

// What one process has advised. The kernel has no call that takes advice back; "no huge pages" is what ends it.
class HugepageAdvice {
 public:
  using Function = int (*)(void*, std::size_t, int);
  std::atomic<Function> function{::madvise};  // replaced by tests
  std::atomic<std::int64_t> advised_bytes{0};
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> failures{0};

  // Asks this function instead of the kernel; null: the kernel again.
  void ask_instead(Function other) noexcept { function.store(other == nullptr ? ::madvise : other); }

  bool give(const Advice& advice) noexcept {
    calls.fetch_add(1, std::memory_order_relaxed);
    const int kind = advice.huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE;
    if (function.load(std::memory_order_relaxed)(advice.base, advice.bytes, kind) == 0) return true;
    failures.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
};

// Which huge pages of one chunk carry advice. Guarded by the pool's lock.
class AdvisedPages {
 public:
  // Throws std::bad_alloc.
  void cover(const char* base, std::size_t bytes) {
    first_ = number(base);
    pages_.assign(number(base + bytes - 1) - first_ + 1, State::plain);
  }

  // What to call so that a large block has advice on the huge pages that lie in it as a whole, and other memory none at
  // all. A neighbour loses nothing: a page that reaches into another block is no whole page of that.
  Advice settle(char* base, std::size_t bytes, bool huge, HugepageAdvice& process) noexcept {
    if (pages_.empty()) return {};
    const std::uintptr_t low = huge ? number(base + kHugePage - 1) : number(base);
    const std::uintptr_t high = huge ? number(base + bytes) : number(base + bytes - 1) + 1;
    return set(low, high, huge ? State::advised : State::plain, process);
  }

  // The call failed. It is made again for the next block, of either kind.
  void failed(const Advice& advice, HugepageAdvice& process) noexcept {
    set(number(advice.base), number(advice.base + advice.bytes), State::unknown, process);
  }

  // The chunk goes back to upstream, which may use it for anything.
  Advice end(HugepageAdvice& process) noexcept { return set(first_, first_ + pages_.size(), State::plain, process); }

 private:
  enum class State : std::uint8_t { plain, advised, unknown };

  static std::uintptr_t number(const char* address) noexcept { return reinterpret_cast<std::uintptr_t>(address) / kHugePage; }

  // From the first to the last page in [low, high) that is not so already.
  Advice set(std::uintptr_t low, std::uintptr_t high, State state, HugepageAdvice& process) noexcept {
    std::uintptr_t first = high, last = low;
    std::int64_t more = 0;
    for (std::uintptr_t page = low; page < high; ++page) {
      State& now = pages_[page - first_];
      if (now == state) continue;
      more += (state == State::advised) - (now == State::advised);
      now = state;
      first = std::min(first, page);
      last = page;
    }
    if (first == high) return {};
    process.advised_bytes.fetch_add(more * static_cast<std::int64_t>(kHugePage), std::memory_order_relaxed);
    return {reinterpret_cast<char*>(first * kHugePage), (last - first + 1) * kHugePage, state == State::advised};
  }

  std::uintptr_t first_ = 0;
  std::vector<State> pages_;  // empty: this chunk is never advised
};

}  // namespace rmm_bridge
