// What a process keeps about its forks, once: see fork_copy.hpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/background_thread.hpp"
#include "driver/driver.hpp"
#include "pages/fork_mirror.hpp"
#include "pages/upstream_gate.hpp"

namespace rmm_bridge {

struct ForkState {
  ForkMirror mirror;
  UpstreamGate gate;
  // The thread that prepares a fork has it until that is over, and whoever lets the mirror go while it does so. 0: nobody.
  std::atomic<std::uint32_t> turn{0};
  int depth = 0;                         // forks of that thread, one inside another's hooks
  std::vector<std::uintptr_t> left_out;  // blocks that the newest copies are without; sorted
  void* staging = nullptr;               // pinned; for whoever has the turn
  CUcontext staging_context = nullptr;
  std::atomic<std::int64_t> keep_until_ns{0};
  std::atomic<BackgroundTask*> keeper{nullptr};  // made with the first copy, and never destroyed
  // Of this process: forks that copied, what their children were given, what of it was copied, and how long that took.
  std::atomic<std::uint64_t> count{0}, bytes{0}, copied_bytes{0}, time_ns{0};

  // In a forked child. Makes system calls and nothing else.
  void become_child() noexcept {
    mirror.place();
    gate.forget();
    turn.store(0);
    depth = 0;
    staging = nullptr;  // the driver's, which is the parent's
    for (auto* each : {&count, &bytes, &copied_bytes, &time_ns}) each->store(0);
  }
};

}  // namespace rmm_bridge
