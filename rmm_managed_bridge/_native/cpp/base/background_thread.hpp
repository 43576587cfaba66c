// The bridge's own thread: gives memory back above a pool's release threshold, closes retired pools, and says so when an
// allocation waits very long. Without it, only calls of the program could do that, and a program may make none.
//
// It starts when something first needs it and sleeps while nothing does. It never takes the GIL, and calls the driver
// only through a pool. In a forked child there is none, and the phase keeps everybody from asking for it.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

namespace rmm_bridge {

class BackgroundTask {
 public:
  using Delay = std::chrono::milliseconds;
  static constexpr Delay kNever = Delay::max();

  // Called by the background thread, without locks. Returns when it wants to be called again at the latest.
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
    if (!started_) started_ = start();
    changed_.notify_all();
    return started_;
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
    // Signals are for the program's threads: Python's handlers expect to interrupt one of them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
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
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return made;
  }

  void run() noexcept {
    pthread_setname_np(pthread_self(), "bridge-thread");
    std::unique_lock lock(lock_);
    while (!stopped_) {
      awake_ = false;
      busy_ = true;
      BackgroundTask::Delay next = BackgroundTask::kNever;
      for (std::size_t index = 0; index < tasks_.size() && !stopped_; ++index) {
        BackgroundTask* task = tasks_[index];
        lock.unlock();
        next = std::min(next, task->run());
        lock.lock();
      }
      busy_ = false;
      changed_.notify_all();
      const auto ready = [&] { return awake_ || stopped_; };
      if (next == BackgroundTask::kNever) {
        changed_.wait(lock, ready);
      } else {
        changed_.wait_for(lock, next, ready);
      }
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<BackgroundTask*> tasks_;
  bool started_ = false;
  bool awake_ = false;
  bool busy_ = false;
  bool stopped_ = false;
};

}  // namespace rmm_bridge
