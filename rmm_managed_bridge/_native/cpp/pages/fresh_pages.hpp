// Which pages of managed memory no block has had yet. A device that meets such a page takes a fault for it; one prefetch of all of
// them takes a twentieth of that (docs/design/measured.md).
//
// Kept as a note on each huge page, which a pool changes under its lock. A page that reaches into two spans counts as had once one of
// them was: then a few faults are taken that a prefetch would have spared, never the other way round.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "pages/page_map.hpp"
#include "pages/span.hpp"

namespace rmm_bridge {

inline constexpr std::size_t kLeastPopulated = std::size_t{1} << 20;  // below, a few faults cost less than a call

struct FreshPages {
  char* base = nullptr;
  std::size_t bytes = 0;

  // Those of the block that was just handed out, with the rest of their huge pages in its slab, which the block after it would
  // have: no longer fresh.
  static FreshPages take(PageMap& pages, const Span& span, const char* ptr, std::size_t bytes) noexcept {
    const std::uintptr_t low = number(ptr), high = number(ptr + bytes - 1) + 1;
    const PageMap::HugePages fresh = pages.note(low, high, kHad, [](std::uint8_t) {});
    if (fresh.count == 0) return {};
    char* first = std::max(fresh.base(), span.base);
    return {first, static_cast<std::size_t>(std::min(fresh.base() + fresh.bytes(), span.base + span.bytes) - first)};
  }

  // The piece goes back to upstream: what comes to lie there is fresh.
  static void forget(PageMap& pages, const char* base, std::size_t bytes) noexcept {
    pages.note(number(base), number(base + bytes - 1) + 1, kFresh, [](std::uint8_t) {});
  }

 private:
  static constexpr std::uint8_t kFresh = 0, kHad = 1;
  static std::uintptr_t number(const char* address) noexcept { return reinterpret_cast<std::uintptr_t>(address) / kHugePage; }
};

}  // namespace rmm_bridge
