// A lock for sections of a few instructions that call nothing. Where a section may allocate, use std::mutex.
#pragma once

#include <atomic>
#include <thread>

namespace rmm_bridge {

class SpinLock {
 public:
  void lock() noexcept {
    for (int spins = 0; flag_.test_and_set(std::memory_order_acquire); ++spins) {
      if (spins > 64) std::this_thread::yield();
    }
  }
  void unlock() noexcept { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

}  // namespace rmm_bridge
