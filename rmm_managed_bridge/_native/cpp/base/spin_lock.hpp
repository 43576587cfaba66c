// The lock of the hot paths: an uncontended pair costs 10 instructions where std::mutex costs 55 (callgrind, glibc 2.36).
// For sections that call nothing but malloc. A waiter spins a little and then gives its time slice away, so that a
// holder that was preempted gets to run.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rmm_bridge {

class SpinLock {
 public:
  [[gnu::always_inline]] void lock() noexcept {
    if (taken_.exchange(true, std::memory_order_acquire)) [[unlikely]]
      wait();
  }
  void unlock() noexcept { taken_.store(false, std::memory_order_release); }

 private:
  static constexpr int kLongestPause = 16;
  static constexpr int kSpins = 500;  // 10 to 100 us: by then the holder has lost its processor

  [[gnu::noinline]] void wait() noexcept {
    int pauses = 1, spins = 0;
    do {
      // Reading until it looks free keeps the line shared; growing pauses keep waiters from all trying at once.
      while (taken_.load(std::memory_order_relaxed)) {
        for (int pause = 0; pause < pauses; ++pause) relax();
        pauses = std::min(2 * pauses, kLongestPause);
        if (++spins > kSpins) std::this_thread::yield();
      }
    } while (taken_.exchange(true, std::memory_order_acquire));
  }

  static void relax() noexcept {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  std::atomic<bool> taken_{false};
};

// std::scoped_lock, which the compiler calls instead of putting it in place, costs a hot path 15 instructions more.
template <typename Lock>
class Locked {
 public:
  [[gnu::always_inline]] explicit Locked(Lock& lock) noexcept : lock_(lock) { lock_.lock(); }
  [[gnu::always_inline]] ~Locked() { lock_.unlock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  Lock& lock_;
};

}  // namespace rmm_bridge
