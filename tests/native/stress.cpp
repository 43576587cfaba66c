// Threads on one pool, for ThreadSanitizer and AddressSanitizer: reuse on streams of their own, stealing, frees by other
// threads, resizing, trimming and reading, all at once. Every live block holds a pattern that nobody else may touch.
//   stress FAKE_DRIVER_LIBRARY THREADS STEPS
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "pool/hint_calls.hpp"

using namespace rmm_bridge;

namespace {

struct Held {
  void* ptr;
  std::size_t bytes;
  CUstream stream;
  bool host;
};

std::mutex shared_mutex;
std::deque<Held> shared;  // blocks that any thread may free
std::atomic<int> problems{0};

void fail(const char* what, const void* ptr) {
  std::fprintf(stderr, "%s at %p\n", what, ptr);
  ++problems;
}

std::uint64_t pattern_of(const Held& held) { return reinterpret_cast<std::uintptr_t>(held.ptr) ^ held.bytes; }

void mark(const Held& held) {
  auto* words = static_cast<std::uint64_t*>(held.ptr);
  words[0] = words[held.bytes / 8 - 1] = pattern_of(held);
}

void check(const Held& held) {
  const auto* words = static_cast<const std::uint64_t*>(held.ptr);
  if (words[0] != pattern_of(held) || words[held.bytes / 8 - 1] != pattern_of(held)) fail("a block was changed", held.ptr);
}

// Advice that is noted here is undone by whoever frees the block, also where others on the page have some.
void hint(Process& process, const Held& held) {
  const auto start = reinterpret_cast<std::uintptr_t>(held.ptr);
  note_advice(&process, held.ptr, start & ~std::uintptr_t{4095}, (start + held.bytes + 4095) & ~std::uintptr_t{4095},
              Hinted::kReadMostly, 1);
  if (hints_of(&process, held.ptr).advice != Hinted::kReadMostly) fail("advice was lost", held.ptr);
}

void give(Process& process, const Held& held, bool state_stream) {
  check(held);
  const CUstream* stream = held.host || !state_stream ? nullptr : &held.stream;
  if (TrackedPool::deallocate(process, held.ptr, held.bytes, stream, {}) != Freed::done) fail("a free was refused", held.ptr);
}

void work(Process& process, TrackedPool& pool, CUstream owned, CUstream borrowed, unsigned seed, long steps) {
  std::mt19937 random(seed);
  std::vector<Held> mine;
  const std::size_t sizes[] = {64, 200, 1024, 1024, 1024, 40'000, 300'000, 5'000'000};
  for (long step = 0; step < steps; ++step) {
    const unsigned what = random() % 100;
    if (what < 50 && mine.size() < 20) {
      Held held{nullptr, sizes[random() % std::size(sizes)], random() % 4 == 0 ? borrowed : owned, random() % 3 == 0};
      Request request;
      request.bytes = held.bytes;
      request.alignment = 64;
      request.side = held.host ? Side::cpu : Side::gpu;
      request.host_ordered = held.host;
      request.stream = held.stream;
      Refusal refusal;
      held.ptr = pool.allocate(request, refusal);
      if (held.ptr == nullptr) continue;
      mark(held);
      if (random() % 8 == 0) hint(process, held);
      mine.push_back(held);
    } else if (what < 85 && !mine.empty()) {
      const std::size_t which = random() % mine.size();
      Held held = mine[which];
      mine[which] = mine.back();
      mine.pop_back();
      if (what < 70) {
        give(process, held, held.stream == borrowed || random() % 2 == 0);
      } else {
        std::scoped_lock lock(shared_mutex);
        shared.push_back(held);
      }
    } else if (what < 92) {
      Held held{};
      {
        std::scoped_lock lock(shared_mutex);
        if (shared.empty()) continue;
        held = shared.front();
        shared.pop_front();
      }
      give(process, held, true);
    } else if (what < 95 && !mine.empty() && mine.back().host) {
      Held& held = mine.back();
      check(held);
      const std::size_t bytes = sizes[random() % std::size(sizes)];
      if (void* moved = TrackedPool::reallocate(process, held.ptr, bytes); moved != nullptr) {
        held.ptr = moved;
        held.bytes = bytes;
        mark(held);
      }
    } else if (what < 96) {
      pool.trim();
    } else if (what < 97) {
      pool.numbers();
      pool.live_count();
    } else if (what < 98) {
      std::size_t count = 0;
      process.ledger.for_each([&](const Entry&) { ++count; });
      process.ledger.for_each_holder([&](const HolderKey&, const Usage&) { ++count; });
    } else if (!mine.empty()) {
      const TrackedPool::Found found = TrackedPool::find(process, static_cast<char*>(mine.back().ptr) + 8);
      if (found.start != mine.back().ptr) fail("an interior pointer leads elsewhere", mine.back().ptr);
    }
  }
  for (const Held& held : mine) give(process, held, true);
}

// Wrong frees: all threads free the same block at once, and one gives it a hint meanwhile. One of them has it, and the hint ends.
void free_at_once(Process& process, TrackedPool& pool, int threads, int rounds) {
  std::atomic<int> round{0}, freed{0}, over{0};
  void* block = nullptr;
  std::vector<std::thread> workers;
  for (int index = 0; index < threads; ++index) {
    workers.emplace_back([&, index] {
      for (int turn = 1; turn <= rounds; ++turn) {
        while (round.load() < turn) std::this_thread::yield();
        if (index == 0) note_placement(&process, block, 0);
        if (TrackedPool::deallocate(process, block, TrackedPool::kUnstated, nullptr, {}) == Freed::done) ++freed;
        ++over;
      }
    });
  }
  for (int turn = 1; turn <= rounds; ++turn) {
    Request request;
    request.bytes = 1024;
    request.alignment = 64;
    Refusal refusal;
    block = pool.allocate(request, refusal);
    round.store(turn);
    while (over.load() < turn * threads) std::this_thread::yield();
    if (freed.load() != turn) fail("a block was freed by two threads, or by none", block);
    if (process.hints.size() != 0) fail("a hint outlived its block", block);
    freed.store(turn);
  }
  for (std::thread& worker : workers) worker.join();
}

// Gives memory back slowly, as CUDA does.
class SlowUpstream final : public Upstream {
 public:
  void* allocate(std::size_t bytes) noexcept override { return host_.allocate(bytes); }
  void deallocate(void* ptr, std::size_t bytes) noexcept override {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    host_.deallocate(ptr, bytes);
  }
  bool gives_zeros() const noexcept override { return host_.gives_zeros(); }
  std::size_t chunk_bytes() const noexcept override { return 0; }

 private:
  HostUpstream host_;
};

// As much memory as the threads need at once, and one that gives back all the time what is free: nobody goes without.
void at_the_limit(Process& process, int threads, int rounds) {
  constexpr std::size_t kBytes = std::size_t{4} << 20;
  PoolOptions options;
  options.limit_bytes = threads * kBytes;
  auto& pool = *new TrackedPool(process, std::make_unique<SlowUpstream>(), nullptr, nullptr, options, -1, 2, Track::off);
  std::atomic<bool> over{false};
  std::thread trimmer([&] {
    while (!over.load()) {
      pool.trim();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
  std::vector<std::thread> workers;
  for (int index = 0; index < threads; ++index) {
    workers.emplace_back([&] {
      Request request;
      request.bytes = kBytes;
      request.alignment = 64;
      for (int turn = 0; turn < rounds; ++turn) {
        Refusal refusal;
        void* ptr = pool.allocate(request, refusal);
        if (ptr == nullptr) return fail("no memory, though there is enough", nullptr);
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        TrackedPool::deallocate(process, ptr, kBytes, nullptr, {});
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  over.store(true);
  trimmer.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int threads = std::atoi(argv[2]);
  auto& process = *new Process();
  process.history.set_limit(100);
  process.driver.load(argv[1]);
  CUcontext context = nullptr;
  if (!process.driver.loaded || process.driver.primary_retain(&context, 0) != CUDA_SUCCESS) return 3;
  process.driver.ctx_push(context);
  PoolOptions options;
  options.limit_bytes = std::size_t{1} << 31;
  auto& pool =
      *new TrackedPool(process, std::make_unique<HostUpstream>(), &process.driver, context, options, 0, 1, Track::counters);
  std::vector<CUstream> streams(2 * threads);
  for (CUstream& stream : streams) process.driver.stream_create(&stream, CU_STREAM_NON_BLOCKING);
  static int owner;
  for (int index = 0; index < threads; ++index) {
    KnownStream ref;
    pool.resolve(streams[2 * index], ref);
    pool.hold(ref, &owner);
  }
  auto& untracked =
      *new TrackedPool(process, std::make_unique<HostUpstream>(), &process.driver, context, options, 0, 1, Track::off);
  for (TrackedPool* each : {&pool, &untracked}) free_at_once(process, *each, 2, 100'000);
  at_the_limit(process, threads, 300);
  std::vector<std::thread> workers;
  for (int index = 0; index < threads; ++index) {
    workers.emplace_back([&, index] {
      process.driver.ctx_push(context);
      work(process, pool, streams[2 * index], streams[2 * index + 1], 17 + index, std::atol(argv[3]));
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (const Held& held : shared) give(process, held, true);
  if (pool.live_count() != 0 || pool.live_bytes() != 0 || process.ledger.current_bytes() != 0) fail("blocks are left", nullptr);
  if (process.hints.size() != 0) fail("hints are left", nullptr);
  pool.retire();
  if (!pool.close()) fail("the pool does not close", nullptr);
  std::printf("%d problems\n", problems.load());
  return problems.load() == 0 ? 0 : 1;
}
