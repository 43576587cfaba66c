// Managed pages behind the fake driver: what was advised on them, where they were asked to be, and what a device that is
// full pushes out, the page that came first going first. Nothing is touched: the bytes lie in host memory all the time.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <utility>

#include <unistd.h>

#include "abi.hpp"

namespace fake {

inline constexpr int kCpu = -1, kNowhere = -2;

struct Page {
  bool read_mostly = false;
  int preferred = kNowhere;
  unsigned accessors = 0;  // bit of a place: 1 << (place + 1)
  int last_prefetch = kNowhere;
  int resident = kCpu;
  bool discarded = false;
};

class Pages {
 public:
  const std::uintptr_t page_bytes = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  std::size_t written_back_bytes = 0;
  std::size_t let_go_bytes = 0;

  Page at(std::uintptr_t address) const {
    auto found = pages_.find(address / page_bytes);
    return found == pages_.end() ? Page{} : found->second;
  }

  // Each page that has any of the bytes, as the driver rounds.
  template <typename Visit>
  void each(std::uintptr_t low, std::size_t bytes, Visit visit) {
    for (std::uintptr_t number = low / page_bytes; number * page_bytes < low + bytes; ++number) visit(number, pages_[number]);
  }

  bool advise(std::uintptr_t low, std::size_t bytes, CUmem_advise advice, int place) {
    bool known = true;
    each(low, bytes, [&](std::uintptr_t, Page& page) {
      switch (advice) {
        case CU_MEM_ADVISE_SET_READ_MOSTLY:
          page.read_mostly = true;
          break;
        case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
          page.read_mostly = false;
          break;
        case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
          page.preferred = place;
          break;
        case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
          page.preferred = kNowhere;
          break;
        case CU_MEM_ADVISE_SET_ACCESSED_BY:
          page.accessors |= 1u << (place + 1);
          break;
        case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
          page.accessors &= ~(1u << (place + 1));
          break;
        default:
          known = false;
      }
    });
    return known;
  }

  void prefetch(std::uintptr_t low, std::size_t bytes, int place, std::size_t device_bytes) {
    each(low, bytes, [&](std::uintptr_t number, Page& page) {
      page.last_prefetch = place;
      page.discarded = false;
      if (page.resident == place) return;
      page.resident = place;
      if (place == kCpu) return;
      auto& order = on_device_[place];
      order.push_back(number);
      // What has moved away since is still in the order; a test that asks for more than the device has goes one way.
      if (order.size() * page_bytes <= device_bytes) return;
      Page& oldest = pages_[order.front()];
      order.pop_front();
      if (oldest.resident != place) return;
      oldest.resident = kCpu;
      (oldest.discarded ? let_go_bytes : written_back_bytes) += page_bytes;
    });
  }

  void discard(std::uintptr_t low, std::size_t bytes) {
    each(low, bytes, [](std::uintptr_t, Page& page) { page.discarded = true; });
  }

  void clear() {
    pages_.clear();
    on_device_.clear();
    written_back_bytes = let_go_bytes = 0;
  }

 private:
  std::map<std::uintptr_t, Page> pages_;
  std::map<int, std::deque<std::uintptr_t>> on_device_;
};

}  // namespace fake
