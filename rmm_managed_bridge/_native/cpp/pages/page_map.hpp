// From any address to the span that holds it, without a lock: what is ours, and which block it lies in.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "base/spin_lock.hpp"

namespace rmm_bridge {

struct Span;

// Spans are whole granules. 256 KiB keeps the waste of a 2 MiB block within 12.5 % and is a multiple of the 64 KiB
// page that CPU and GPU blocks must not share.
inline constexpr unsigned kGranuleBits = 18;
inline constexpr std::size_t kGranule = std::size_t{1} << kGranuleBits;

// On x86-64, and on aarch64 with pages of 4 KiB. With larger base pages advice for 2 MiB is as good: the kernel takes
// what it can.
inline constexpr unsigned kHugePageBits = 21;
inline constexpr std::size_t kHugePage = std::size_t{1} << kHugePageBits;

class PageMap {
 public:
  // Null for an address that no live span covers.
  [[gnu::always_inline]] Span* find(const void* address) const noexcept {
    const auto number = reinterpret_cast<std::uintptr_t>(address) >> kGranuleBits;
    if (number >> (2 * kLevelBits)) return nullptr;
    const Leaf* leaf = root_[number >> kLevelBits].load(std::memory_order_acquire);
    Span* span = leaf == nullptr ? nullptr : leaf->spans[number & kMask].load(std::memory_order_acquire);
    return span != nullptr || alone_count_.load(std::memory_order_relaxed) == 0 ? span : find_alone(address);
  }

  // Debug mode: a piece that is one block, wherever it lies. Throws std::bad_alloc.
  void set_alone(const void* base, std::size_t bytes, Span* span) {
    const auto start = reinterpret_cast<std::uintptr_t>(base);
    std::scoped_lock lock(alone_lock_);
    alone_[start] = {start + bytes, span};
    alone_count_.store(alone_.size(), std::memory_order_relaxed);
  }
  void clear_alone(const void* base) noexcept {
    std::scoped_lock lock(alone_lock_);
    alone_.erase(reinterpret_cast<std::uintptr_t>(base));
    alone_count_.store(alone_.size(), std::memory_order_relaxed);
  }
  SpinLock& lock_for_fork() noexcept { return alone_lock_; }

  // Makes room for the range; after that, `set` on it cannot fail. Throws std::bad_alloc.
  void reserve(const void* base, std::size_t bytes) {
    auto first = reinterpret_cast<std::uintptr_t>(base) >> (kGranuleBits + kLevelBits);
    const auto last = (reinterpret_cast<std::uintptr_t>(base) + bytes - 1) >> (kGranuleBits + kLevelBits);
    if (last >> kLevelBits) throw std::bad_alloc();
    for (; first <= last; ++first) {
      if (root_[first].load(std::memory_order_acquire) != nullptr) continue;
      // Leaves are never freed: a lookup may be reading one at any time. calloc leaves untouched pages unpopulated.
      auto* fresh = static_cast<Leaf*>(std::calloc(1, sizeof(Leaf)));
      if (fresh == nullptr) throw std::bad_alloc();
      Leaf* expected = nullptr;
      if (!root_[first].compare_exchange_strong(expected, fresh)) std::free(fresh);
    }
  }

  // Calls `visit(span)` for each that an address leads to, with no lock held. One that changes hands meanwhile may be left out.
  template <typename Visit>
  void for_each_span(Visit visit) const {
    Span* before = nullptr;
    for (const auto& each : root_) {
      const Leaf* leaf = each.load(std::memory_order_acquire);
      if (leaf == nullptr) continue;
      for (const auto& entry : leaf->spans) {
        Span* span = entry.load(std::memory_order_acquire);
        if (span != nullptr && span != before) visit(span);
        before = span;
      }
    }
    std::vector<Span*> alone;
    {
      std::scoped_lock lock(alone_lock_);
      for (const auto& [start, piece] : alone_) alone.push_back(piece.span);
    }
    for (Span* span : alone) visit(span);
  }

  struct HugePages {
    std::uintptr_t first = 0, count = 0;
    char* base() const noexcept { return reinterpret_cast<char*>(first * kHugePage); }
    std::size_t bytes() const noexcept { return count * kHugePage; }
  };

  // Writes a note about the huge pages from `low` to below `high`, where there is room for them, and returns the range of those that had
  // another one, which `changed` is told of. What a note says is its side's: hugepages.hpp for the CPU's, fresh_pages.hpp for devices'.
  template <typename Changed>
  HugePages note(std::uintptr_t low, std::uintptr_t high, std::uint8_t note, Changed changed) noexcept {
    std::uintptr_t first = high, last = low;
    for (std::uintptr_t page = low; page < high; ++page) {
      Leaf* leaf = root_[page >> kNoteBits].load(std::memory_order_relaxed);
      std::atomic<std::uint8_t>& at = leaf->notes[page & ((std::uintptr_t{1} << kNoteBits) - 1)];
      const std::uint8_t before = at.load(std::memory_order_relaxed);
      if (before == note) continue;
      at.store(note, std::memory_order_relaxed);
      changed(before);
      if (first == high) first = page;
      last = page;
    }
    return first == high ? HugePages{} : HugePages{first, last - first + 1};
  }

  void set(const void* base, std::size_t bytes, Span* span) noexcept {
    const auto first = reinterpret_cast<std::uintptr_t>(base) >> kGranuleBits;
    for (std::uintptr_t number = first; number < first + (bytes >> kGranuleBits); ++number) {
      root_[number >> kLevelBits].load(std::memory_order_relaxed)->spans[number & kMask].store(span, std::memory_order_release);
    }
  }

 private:
  static constexpr unsigned kLevelBits = 15;  // 2 * 15 + 18 = 48 bits of address
  static constexpr unsigned kNoteBits = kLevelBits + kGranuleBits - kHugePageBits;
  static constexpr std::uintptr_t kMask = (std::uintptr_t{1} << kLevelBits) - 1;
  [[gnu::noinline]] Span* find_alone(const void* address) const noexcept {
    const auto number = reinterpret_cast<std::uintptr_t>(address);
    std::scoped_lock lock(alone_lock_);
    auto after = alone_.upper_bound(number);
    if (after == alone_.begin()) return nullptr;
    const auto& [end, span] = std::prev(after)->second;
    return number < end ? span : nullptr;
  }

  struct Alone {
    std::uintptr_t end;
    Span* span;
  };
  mutable SpinLock alone_lock_;
  std::map<std::uintptr_t, Alone> alone_;  // by start
  std::atomic<std::size_t> alone_count_{0};

  struct Leaf {
    std::atomic<Span*> spans[std::size_t{1} << kLevelBits];
    std::atomic<std::uint8_t> notes[std::size_t{1} << kNoteBits];
  };
  std::atomic<Leaf*> root_[std::size_t{1} << kLevelBits] = {};
};

}  // namespace rmm_bridge
