// The bridge's own thread: gives memory back above a pool's budget, closes retired pools, and says so when an
// allocation waits very long. Without it, only calls of the program could do that, and a program may make none.
//
// It starts when something first needs it and sleeps while nothing does. It never takes the GIL, and calls the driver
// only through a pool. In a forked child there is none, and the phase keeps everybody from asking for it. A fork finds it ended where
// that takes no time, and it begins again with the next slow call of a pool: Python warns of a fork beside other threads.
#pragma once

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/threads.hpp"

namespace rmm_bridge {

class BackgroundTask {
 public:
  using Delay = std::chrono::milliseconds;
  static constexpr Delay kNever = Delay::max();
  static constexpr Delay kOver = Delay{-1};

  // Called by the background thread, without locks. Returns when it wants to be called again at the latest, or that it need not be ever.
  virtual Delay run() noexcept = 0;

 protected:
  ~BackgroundTask() = default;
};

class BackgroundThread {
 public:
  // `task` outlives everything. Throws std::bad_alloc.
  void add(BackgroundTask* task) {
    std::scoped_lock lock(lock_);
    tasks_.push_back(task);
  }

  // Everybody is asked soon. False if there can be no thread: then the caller does without.
  bool wake() noexcept {
    std::scoped_lock lock(lock_);
    if (stopped_) return false;
    awake_ = true;
    if (resting_) return true;  // it begins again after the fork
    rested_.store(false, std::memory_order_relaxed);
    if (!started_) started_ = start();
    changed_.notify_all();
    return started_;
  }

  // Before a fork: the thread ends, unless what it has in hand takes longer than `patience`.
  void rest(std::chrono::milliseconds patience) noexcept {
    std::unique_lock lock(lock_);
    if (!started_ || resting_ || stopped_) return;
    resting_ = true;
    changed_.notify_all();
    const bool ended = changed_.wait_for(lock, patience, [&] { return !started_; });
    resting_ = false;
    if (!ended) return;
    rested_.store(true, std::memory_order_relaxed);
    const std::uint32_t thread = thread_;
    lock.unlock();
    // Not only its work has to be over: Python asks the kernel how many threads there are.
    for (int turn = 0; turn < 1000 && ::syscall(SYS_tgkill, ::getpid(), thread, 0) == 0; ++turn) std::this_thread::yield();
  }

  // If it has ended for a fork. For calls that are slow anyway, with no lock held.
  void begin_again() noexcept {
    if (rested_.load(std::memory_order_relaxed)) [[unlikely]]
      wake();
  }

  // In a forked child, which has no such thread: whoever held the lock, or was waited for, is not there. The tasks stay; they are
  // added under a lock that a fork holds.
  void forget_in_child() noexcept {
    new (&lock_) std::mutex;
    new (&changed_) std::condition_variable;
    started_ = awake_ = busy_ = stopped_ = resting_ = false;
    rested_.store(false, std::memory_order_relaxed);
  }

  // At interpreter exit, without the GIL: what is being given back may need it (an upstream in Python). A device that
  // never ends its work is not waited for beyond `patience`: the thread then stays in the driver and dies with the process.
  void stop(std::chrono::milliseconds patience) noexcept {
    std::unique_lock lock(lock_);
    stopped_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, patience, [&] { return !busy_; });
  }

 private:
  bool start() noexcept {
    const WithoutSignals without;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const auto body = [](void* self) -> void* {
      static_cast<BackgroundThread*>(self)->run();
      return nullptr;
    };
    const bool made = pthread_create(&thread, &detached, body, this) == 0;
    pthread_attr_destroy(&detached);
    return made;
  }

  void run() noexcept {
    pthread_setname_np(pthread_self(), "bridge-thread");
    std::unique_lock lock(lock_);
    thread_ = native_thread_id();
    while (!stopped_ && !resting_) {
      awake_ = false;
      busy_ = true;
      BackgroundTask::Delay next = BackgroundTask::kNever;
      for (std::size_t index = 0; index < tasks_.size() && !stopped_ && !resting_;) {
        BackgroundTask* task = tasks_[index];
        lock.unlock();
        const BackgroundTask::Delay delay = task->run();
        lock.lock();
        if (delay == BackgroundTask::kOver) {
          tasks_.erase(tasks_.begin() + static_cast<std::ptrdiff_t>(index));  // others only add
        } else {
          next = std::min(next, delay);
          ++index;
        }
      }
      busy_ = false;
      changed_.notify_all();
      const auto ready = [&] { return awake_ || stopped_ || resting_; };
      if (next == BackgroundTask::kNever) {
        changed_.wait(lock, ready);
      } else {
        changed_.wait_for(lock, next, ready);
      }
    }
    if (!resting_) return;
    started_ = false;
    changed_.notify_all();
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<BackgroundTask*> tasks_;
  bool started_ = false;
  bool awake_ = false;
  bool busy_ = false;
  bool stopped_ = false;
  bool resting_ = false;             // a fork waits for its end
  std::uint32_t thread_ = 0;         // its number
  std::atomic<bool> rested_{false};  // it has ended so
};

}  // namespace rmm_bridge
