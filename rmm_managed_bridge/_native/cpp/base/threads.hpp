// Threads of the bridge's own. No signal is for them: Python's handlers expect to interrupt one of the program's.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <thread>

namespace rmm_bridge {

// Threads that are made while one lives get no signal.
class WithoutSignals {
 public:
  WithoutSignals() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

inline constexpr std::size_t kMostThreads = 8;

// Calls `work` on up to so many threads at once, this one among them, until all have returned. There may be fewer, so each takes its
// next part of what is to be done until nothing is left.
template <typename Work>
void on_threads(std::size_t count, Work& work) noexcept {
  std::array<std::thread, kMostThreads> others;
  std::size_t begun = 0;
  try {
    const WithoutSignals without;
    for (; begun + 1 < std::min(count, kMostThreads); ++begun) others[begun] = std::thread([&work] { work(); });
  } catch (const std::exception&) {  // no more threads are to be had
  }
  work();
  for (std::size_t index = 0; index < begun; ++index) others[index].join();
}

}  // namespace rmm_bridge
