// Nobody is refused memory that is there: another thread wants it while upstream is being asked for a piece, or takes one back.
#include <chrono>
#include <cstdio>
#include <functional>
#include <future>

#include "pool/tracked_pool.hpp"

using namespace rmm_bridge;

namespace {

constexpr std::size_t kMib = std::size_t{1} << 20;
int problems = 0;

void expect(bool right, const char* what) {
  if (right) return;
  ++problems;
  std::fprintf(stderr, "%s\n", what);
}

// Gives back what it gave and nothing less, as upstreams of devices do, and acts in the next call.
class ActingUpstream final : public Upstream {
 public:
  ActingUpstream(std::function<void()>& in_allocate, std::function<void()>& in_deallocate, std::size_t most_bytes)
      : in_allocate_(in_allocate), in_deallocate_(in_deallocate), most_bytes_(most_bytes) {}
  void* allocate(std::size_t bytes) noexcept override {
    act(in_allocate_);
    return bytes <= most_bytes_ ? host_.allocate(bytes) : nullptr;
  }
  void deallocate(void* ptr, std::size_t bytes) noexcept override {
    act(in_deallocate_);
    host_.deallocate(ptr, bytes);
  }
  bool gives_zeros() const noexcept override { return true; }
  std::size_t chunk_bytes() const noexcept override { return 0; }

 private:
  static void act(std::function<void()>& what) {
    if (const auto acting = std::exchange(what, nullptr)) acting();
  }

  std::function<void()>&in_allocate_, &in_deallocate_;
  const std::size_t most_bytes_;
  HostUpstream host_;
};

struct Acting {
  std::function<void()> in_allocate, in_deallocate;
  TrackedPool* pool;

  explicit Acting(std::size_t limit_bytes, std::size_t most_bytes) {
    static Process& process = *new Process();  // never freed, as in a program
    PoolOptions options;
    options.limit_bytes = limit_bytes;
    auto upstream = std::make_unique<ActingUpstream>(in_allocate, in_deallocate, most_bytes);
    pool = new TrackedPool(process, std::move(upstream), nullptr, nullptr, options, -1, kHostKind, Track::counters);
  }

  void* allocate(std::size_t bytes) {
    Refusal refusal;
    return pool->allocate({.bytes = bytes, .alignment = kCpuUnit}, refusal);
  }
  void free(void* ptr) { TrackedPool::deallocate(pool->process(), ptr, TrackedPool::kUnstated, nullptr, {}); }

  // What another thread gets that wants memory from inside of `call` on; it has time to be refused there.
  void* other(std::size_t bytes, std::function<void()>& call, const std::function<void()>& act) {
    std::future<void*> wanted;
    call = [&] {
      wanted = std::async(std::launch::async, [&, bytes] { return allocate(bytes); });
      wanted.wait_for(std::chrono::milliseconds(100));
    };
    act();
    return wanted.get();
  }
};

}  // namespace

int main() {
  {
    Acting acting(8 * kMib, 4 * kMib);
    void* had = nullptr;
    void* got = acting.other(4 * kMib, acting.in_allocate, [&] { had = acting.allocate(8 * kMib); });
    expect(had == nullptr, "upstream gave more than it has");
    expect(got != nullptr, "refused for a piece that upstream has not given to anybody");
  }
  {
    Acting acting(8 * kMib, 8 * kMib);
    acting.free(acting.allocate(8 * kMib));
    expect(acting.other(6 * kMib, acting.in_deallocate, [&] { acting.pool->trim(); }) != nullptr,
           "refused for a piece that goes back");
  }
  {
    Acting acting(8 * kMib, 8 * kMib);
    void* had = acting.allocate(4 * kMib);
    expect(acting.other(6 * kMib, acting.in_allocate, [&] { acting.allocate(2 * kMib); }) == nullptr, "more than the limit");
    acting.free(had);
  }
  std::printf("%d problems\n", problems);
  return problems == 0 ? 0 : 1;
}
