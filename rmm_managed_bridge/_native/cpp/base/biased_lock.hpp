// A SpinLock that costs the thread which nearly always takes it no locked instruction: 1 ns a pair instead of 5. A pair of
// allocate and free takes a front's lock twice, and one of the ledger's.
//
// The first thread that enters is the lock's owner for ever. Once nobody else has come for a while, the owner enters
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

#include "base/spin_lock.hpp"

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
  // For the hot path, which is whose the lock should be. True if the owner has entered without the inner lock: say `leave` then,
  // else `unlock`.
  [[gnu::always_inline]] bool enter() noexcept {
    const std::uintptr_t self = this_thread();
    if (entitled_.load(std::memory_order_relaxed) == self) [[likely]] {
      inside_.store(true, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);  // the processor's half of the fence is `Fence::everywhere`
      if (entitled_.load(std::memory_order_relaxed) == self) [[likely]]
        return true;
      leave();
    }
    enter_slowly(self);
    return false;
  }
  [[gnu::always_inline]] void leave() noexcept { inside_.store(false, std::memory_order_release); }

  // For everybody else, and for a fork: always by the inner lock, so that whoever waits is where a child finds it unlocked.
  void lock() noexcept {
    lock_.lock();
    keep_out(this_thread());
  }
  void unlock() noexcept { lock_.unlock(); }

  // Whether the owner enters without the inner lock now, for tests.
  bool biased() const noexcept { return entitled_.load() != 0; }

 private:
  static constexpr std::uint32_t kPatience = 32;  // turns of the owner alone before it may enter so
  static constexpr std::uint32_t kLongestPatience = std::uint32_t{1} << 20;

  // The same in all native modules, unlike the address of a variable, and no other thread's while this one lives. One that
  // comes to the address of a thread that has ended takes its place.
  static std::uintptr_t this_thread() noexcept { return reinterpret_cast<std::uintptr_t>(__builtin_thread_pointer()); }

  [[gnu::noinline]] void enter_slowly(std::uintptr_t self) noexcept {
    lock_.lock();
    const std::uintptr_t owner = owner_.load(std::memory_order_relaxed);
    if (owner == 0) owner_.store(self, std::memory_order_relaxed);
    if (owner != 0 && owner != self) {
      keep_out(self);
    } else if (++turns_ == patience_ && Fence::available()) {
      inside_.store(false, std::memory_order_relaxed);   // what a fork may have kept of a thread at this address
      entitled_.store(self, std::memory_order_relaxed);  // from the next turn on
    }
  }

  // Under the inner lock: from here on the owner comes by it too, if it is another thread.
  void keep_out(std::uintptr_t self) noexcept {
    if (owner_.load(std::memory_order_relaxed) == self) return;  // it is not inside now, and nobody else gets past the inner lock
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
