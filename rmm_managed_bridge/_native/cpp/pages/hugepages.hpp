// Advice to back large host blocks with huge pages, as NumPy gives it for its own memory: which huge pages carry it, by address, and
// the calls. Advice is noted under the pool's lock and given after it.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "pages/page_map.hpp"

namespace rmm_bridge {

inline constexpr std::size_t kLeastAdvised = std::size_t{4} << 20;  // NumPy's own threshold

// A call to be made once no lock is held; none for no bytes.
struct Advice {
  char* base = nullptr;
  std::size_t bytes = 0;
  bool huge = false;
};

// What one process has advised. The kernel has no call that takes advice back; "no huge pages" is what ends it.
//
// What is known of a page is in the page map, whose entries a pool changes under its lock. A page at the border of two pools may be
// known wrongly: then it has small pages where large ones would do, or a call is made once more.
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

  // What to call so that a large block has advice on the huge pages that lie in it as a whole, and other memory none at
  // all. A neighbour loses nothing: a page that reaches into another block is no whole page of that.
  Advice settle(PageMap& pages, char* base, std::size_t bytes, bool huge) noexcept {
    const std::uintptr_t low = huge ? number(base + kHugePage - 1) : number(base);
    const std::uintptr_t high = huge ? number(base + bytes) : number(base + bytes - 1) + 1;
    return set(pages, low, high, huge ? State::advised : State::plain);
  }

  // The call failed. It is made again for the next block, of either kind.
  void failed(PageMap& pages, const Advice& advice) noexcept {
    set(pages, number(advice.base), number(advice.base + advice.bytes), State::unknown);
  }

  // The range goes back to an upstream that may use it for anything.
  Advice end(PageMap& pages, char* base, std::size_t bytes) noexcept {
    return set(pages, number(base), number(base + bytes - 1) + 1, State::plain);
  }

  // The range is about to be unmapped, and takes its advice along; what is left of a page at its ends can be no huge page.
  void forget(PageMap& pages, char* base, std::size_t bytes) noexcept { end(pages, base, bytes); }

  // What the range carries is not known.
  void doubt(PageMap& pages, char* base, std::size_t bytes) noexcept {
    set(pages, number(base), number(base + bytes - 1) + 1, State::unknown);
  }

 private:
  enum class State : std::uint8_t { plain, advised, unknown };  // in the page map, where zero is plain

  static std::uintptr_t number(const char* address) noexcept { return reinterpret_cast<std::uintptr_t>(address) / kHugePage; }

  // From the first to the last page in [low, high) that is not so already.
  Advice set(PageMap& pages, std::uintptr_t low, std::uintptr_t high, State state) noexcept {
    std::int64_t more = 0;
    const PageMap::HugePages changed = pages.note(low, high, static_cast<std::uint8_t>(state), [&](std::uint8_t before) {
      more += (state == State::advised) - (static_cast<State>(before) == State::advised);
    });
    if (changed.count == 0) return {};
    advised_bytes.fetch_add(more * static_cast<std::int64_t>(kHugePage), std::memory_order_relaxed);
    return {changed.base(), changed.bytes(), state == State::advised};
  }
};

}  // namespace rmm_bridge
