// What keeps the memory of live blocks mapped while a fork reads it: a free on another thread may end a block at any time, and its
// piece would go back to where it came from under the hands of who copies it.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "pages/upstream.hpp"

namespace rmm_bridge {

// Who gives back passes one at a time or many at once, and waits while it is closed. From any thread, with no lock held and without
// the GIL, which whoever closes it may need.
class UpstreamGate {
 public:
  class Pass {
   public:
    explicit Pass(UpstreamGate& gate) noexcept : gate_(gate) {
      for (;;) {
        gate_.inside_.fetch_add(1);
        if (!gate_.closed_.load()) return;
        gate_.inside_.fetch_sub(1);
        std::this_thread::sleep_for(kPause);
      }
    }
    ~Pass() { gate_.inside_.fetch_sub(1); }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    UpstreamGate& gate_;
  };

  // False, and it stays open, if somebody is still inside at that time. By one thread at a time.
  bool close(std::chrono::steady_clock::time_point until) noexcept {
    closed_.store(true);
    while (inside_.load() != 0) {
      if (std::chrono::steady_clock::now() >= until) {
        closed_.store(false);
        return false;
      }
      std::this_thread::sleep_for(kPause);
    }
    return true;
  }
  void open() noexcept { closed_.store(false); }

  // In a forked child: whoever was inside is not there.
  void forget() noexcept {
    closed_.store(false);
    inside_.store(0);
  }

 private:
  static constexpr std::chrono::microseconds kPause{50};
  std::atomic<bool> closed_{false};
  std::atomic<int> inside_{0};
};

// An upstream behind the gate.
class GatedUpstream final : public Upstream {
 public:
  GatedUpstream(std::unique_ptr<Upstream> inner, UpstreamGate& gate) : inner_(std::move(inner)), gate_(gate) {}

  void* allocate(std::size_t bytes) noexcept override { return inner_->allocate(bytes); }
  void deallocate(void* ptr, std::size_t bytes) noexcept override {
    const UpstreamGate::Pass pass(gate_);
    inner_->deallocate(ptr, bytes);
  }
  bool gives_zeros() const noexcept override { return inner_->gives_zeros(); }
  std::size_t chunk_bytes() const noexcept override { return inner_->chunk_bytes(); }
  std::string refused_by() const override { return inner_->refused_by(); }
  bool gives_parts() const noexcept override { return inner_->gives_parts(); }
  bool release(char* base, std::size_t bytes) noexcept override {
    const UpstreamGate::Pass pass(gate_);
    return inner_->release(base, bytes);
  }
  bool clear(char* base, std::size_t bytes) noexcept override { return inner_->clear(base, bytes); }
  char* reserve(std::size_t bytes) noexcept override { return inner_->reserve(bytes); }
  bool move(char* from, std::size_t from_bytes, char* to, std::size_t bytes) noexcept override {
    const UpstreamGate::Pass pass(gate_);
    return inner_->move(from, from_bytes, to, bytes);
  }

 private:
  const std::unique_ptr<Upstream> inner_;
  UpstreamGate& gate_;
};

}  // namespace rmm_bridge
