// A SpinLock that costs the thread which nearly always takes it no locked instruction: 1 ns a pair instead of 5. A pair of
// allocate and free takes four locks, and on one thread those were a quarter of its time.
//
// The first thread that takes the lock is its owner for ever. Once nobody else has come for a while, the owner enters
// without the inner lock: it only says that it is inside, and looks whether it still may. Whoever else comes takes that
// right away under the inner lock and waits until the owner is out. It is Dekker's algorithm with its two fences made unequal: a
// store that a later load may overtake would let both in, so one side needs a fence, and here the rare side has one that makes
// every running thread of the process pass a fence too (membarrier(2); liburcu and folly's hazard pointers rest on the same).
//
// Only the owner ever writes `inside_`. If the right could go to another thread, the last words of the one before ("not
// inside after all") could fall on the new one's.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "spin_lock.hpp"

namespace rmm_bridge {

// Every other running thread of this process passes a memory fence before `everywhere` returns.
class Fence {
 public:
  // Whether the kernel can do that. Inherited by forked children.
  static bool available() noexcept {
    static const bool registered = ::syscall(SYS_membarrier, kRegister, 0, 0) == 0;
    return registered;
  }
  static void everywhere() noexcept {
    if (::syscall(SYS_membarrier, kExpedited, 0, 0) == 0) return;
    // Taken away since, by a sandbox that was entered late. No processor keeps a store to itself for that long.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  static constexpr int kExpedited = 1 << 3, kRegister = 1 << 4;  // MEMBARRIER_CMD_PRIVATE_EXPEDITED, and to register for it
};

class BiasedLock {
 public:
  // True if the owner has entered without the inner lock: say `leave` then, else `unlock`.
  [[gnu::always_inline]] bool enter() noexcept {
    const std::uintptr_t self = this_thread();
    if (entitled_.load(std::memory_order_relaxed) == self) [[likely]] {
      inside_.store(true, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);  // the processor's half of the fence is `Fence::everywhere`
      if (entitled_.load(std::memory_order_relaxed) == self) [[likely]] return true;
      leave();
    }
    lock_slowly(self);
    return false;
  }
  [[gnu::always_inline]] void leave() noexcept { inside_.store(false, std::memory_order_release); }

  void lock() noexcept { enter(); }

  [[gnu::always_inline]] void unlock() noexcept {
    if (inside_.load(std::memory_order_relaxed) && owner_.load(std::memory_order_relaxed) == this_thread()) [[likely]] {
      inside_.store(false, std::memory_order_release);
    } else {
      lock_.unlock();
    }
  }

  // Whether the owner enters without the inner lock now, for tests.
  bool biased() const noexcept { return entitled_.load() != 0; }

 private:
  static constexpr std::uint32_t kPatience = 32;  // turns of the owner alone before it may enter so
  static constexpr std::uint32_t kLongestPatience = std::uint32_t{1} << 20;

  // The same in all native modules, unlike the address of a variable, and no other thread's while this one lives. One that
  // comes to the address of a thread that has ended takes its place: it is a thread like that one.
  static std::uintptr_t this_thread() noexcept { return reinterpret_cast<std::uintptr_t>(__builtin_thread_pointer()); }

  [[gnu::noinline]] void lock_slowly(std::uintptr_t self) noexcept {
    lock_.lock();
    const std::uintptr_t owner = owner_.load(std::memory_order_relaxed);
    if (owner == 0) owner_.store(self, std::memory_order_relaxed);
    if (owner == 0 || owner == self) {
      if (++turns_ == patience_ && Fence::available()) entitled_.store(self, std::memory_order_relaxed);  // from the next turn on
      return;
    }
    turns_ = 0;
    if (entitled_.load(std::memory_order_relaxed) == 0) return;
    entitled_.store(0, std::memory_order_relaxed);
    Fence::everywhere();
    while (inside_.load(std::memory_order_acquire)) std::this_thread::yield();
    patience_ = std::min(2 * patience_, kLongestPatience);  // threads that take turns should not pay for a fence each time
  }

  std::atomic<std::uintptr_t> entitled_{0};  // the owner, or nobody. Written under `lock_`
  std::atomic<std::uintptr_t> owner_{0};
  std::atomic<bool> inside_{false};  // written by the owner alone
  SpinLock lock_;
  std::uint32_t turns_ = 0;
  std::uint32_t patience_ = kPatience;
};

template <>
class Locked<BiasedLock> {
 public:
  [[gnu::always_inline]] explicit Locked(BiasedLock& lock) noexcept : lock_(lock), biased_(lock.enter()) {}
  [[gnu::always_inline]] ~Locked() {
    if (biased_) [[likely]] {
      lock_.leave();
    } else {
      lock_.unlock();
    }
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  BiasedLock& lock_;
  const bool biased_;
};

}  // namespace rmm_bridge
