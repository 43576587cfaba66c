// What events are put in order by: a counter that all processors share, and that costs half of what a fine clock does.
#pragma once

#include <cstdint>

#include "base/clock.hpp"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace rmm_bridge {

inline std::uint64_t order_now() noexcept {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  std::uint64_t count;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#else
  return static_cast<std::uint64_t>(steady_time_ns());
#endif
}

}  // namespace rmm_bridge
