// A gate that threads pass all the time and that closes once: whoever closes it knows that nobody is inside, and nobody comes.
//
// Who passes writes to a flag of its own and pays no fence; who closes makes every running thread pass one (biased_lock.hpp has the
// argument). Inside, nobody waits for whoever closes.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "base/biased_lock.hpp"
#include "base/spin_lock.hpp"

namespace rmm_bridge {

class Gate {
 public:
  // One thread's, between `add` and `remove`.
  class Flag {
   private:
    friend class Gate;
    std::atomic<bool> inside_{false};
    Flag* next_ = nullptr;
    Flag* previous_ = nullptr;
  };

  void add(Flag& flag) noexcept {
    std::scoped_lock lock(lock_);
    flag.next_ = flags_;
    if (flags_ != nullptr) flags_->previous_ = &flag;
    flags_ = &flag;
  }
  void remove(Flag& flag) noexcept {
    std::scoped_lock lock(lock_);
    (flag.previous_ != nullptr ? flag.previous_->next_ : flags_) = flag.next_;
    if (flag.next_ != nullptr) flag.next_->previous_ = flag.previous_;
  }

  // True: inside, say `leave`. False: it is closed.
  [[gnu::always_inline]] bool enter(Flag& flag) const noexcept {
    flag.inside_.store(true, std::memory_order_relaxed);
    if (fenced_) [[likely]]
      std::atomic_signal_fence(std::memory_order_seq_cst);
    else
      std::atomic_thread_fence(std::memory_order_seq_cst);
    if (open_.load(std::memory_order_acquire)) [[likely]]
      return true;
    leave(flag);
    return false;
  }
  [[gnu::always_inline]] static void leave(Flag& flag) noexcept { flag.inside_.store(false, std::memory_order_release); }

  // For ever. False if a thread was inside for longer than a second, stopped by a debugger perhaps: it is not waited for.
  bool close() noexcept {
    open_.store(false, std::memory_order_seq_cst);
    if (fenced_) {
      Fence::everywhere();
    } else {
      std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    std::scoped_lock lock(lock_);
    for (const Flag* flag = flags_; flag != nullptr; flag = flag->next_) {
      while (flag->inside_.load(std::memory_order_acquire)) {
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::yield();
      }
    }
    return true;
  }

  // Before the locks of whatever is done inside: `close` holds it while others end theirs.
  SpinLock& lock_for_fork() noexcept { return lock_; }
  // In a forked child. The threads whose flags say that they are inside are not there to leave.
  void forget_in_child() noexcept {
    for (Flag* flag = flags_; flag != nullptr; flag = flag->next_) leave(*flag);
  }

 private:
  std::atomic<bool> open_{true};
  const bool fenced_ = Fence::available();
  SpinLock lock_;
  Flag* flags_ = nullptr;
};

}  // namespace rmm_bridge
