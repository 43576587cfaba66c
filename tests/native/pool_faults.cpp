// Faults of a kind that pools have had, each made to happen without luck.
//   pool_faults FAKE_DRIVER_LIBRARY trim | copy | making | slabs
#include "failing_new.hpp"

#include <dlfcn.h>

#include <barrier>
#include <csignal>
#include <cstdio>
#include <map>
#include <string>

#include "pool/tracked_pool.hpp"

using namespace rmm_bridge;

namespace {

int problems = 0;
std::string doing;

void expect(bool right, const char* what) {
  if (right) return;
  if (++problems <= 20) std::fprintf(stderr, "%s: %s\n", doing.c_str(), what);
}

const char* library = nullptr;

template <typename Function>
Function fake(const char* name) {
  return reinterpret_cast<Function>(dlsym(dlopen(library, RTLD_NOW), name));
}

// A process with the fake driver, and what the test does on its device.
struct Bench {
  Process& process = *new Process();  // never freed, as in a program
  CUcontext context = nullptr;

  Bench() {
    process.driver.load(library);
    if (!process.driver.loaded || process.driver.primary_retain(&context, 0) != CUDA_SUCCESS) std::abort();
    process.driver.ctx_push(context);
  }

  TrackedPool& pool(bool ordered, PoolOptions options = {}, std::unique_ptr<Upstream> upstream = std::make_unique<HostUpstream>(),
                    Track track = Track::counters) {
    return *new TrackedPool(process, std::move(upstream), ordered ? &process.driver : nullptr, context, options, 0, 0, track);
  }

  KnownStream held(TrackedPool& pool) {
    static int owner;
    CUstream stream;
    KnownStream known;
    process.driver.stream_create(&stream, CU_STREAM_NON_BLOCKING);
    if (pool.resolve(stream, known) != Refusal::none) std::abort();
    pool.hold(known, &owner);
    return known;
  }
};

char* allocate(TrackedPool& pool, std::size_t bytes, Side side = Side::cpu) {
  Request request;
  request.bytes = bytes;
  request.alignment = 64;
  request.side = side;
  Refusal refusal;
  return static_cast<char*>(pool.allocate(request, refusal));
}

// No memory for the pool's own lists at one place of a trim after another, while some slabs are half live: what is live stays
// whose it was, in the trims after that too.
void trim_without_memory() {
  Bench bench;
  constexpr std::size_t kBytes = 512 << 10, kPerSlab = 8;
  for (const bool ordered : {false, true}) {
    for (const Side side : {Side::cpu, Side::gpu}) {
      bool over = false;
      for (long place = 0; !over; ++place) {
        doing = "operator new number " + std::to_string(place) + " of a trim fails";
        TrackedPool& pool = bench.pool(ordered);
        std::map<char*, unsigned char> live;
        std::vector<char*> all;
        for (std::size_t index = 0; index < 5 * kPerSlab + 3; ++index) all.push_back(allocate(pool, kBytes, side));
        // The last of each slab: none, one, four, seven, and all; and of one that was only begun none.
        constexpr std::size_t kBackgroundTask[] = {0, 1, 4, 7, 8, 0};
        for (std::size_t index = 0; index < all.size(); ++index) {
          if (index % kPerSlab >= kPerSlab - kBackgroundTask[index / kPerSlab]) {
            live[all[index]] = static_cast<unsigned char>(1 + index);
            std::memset(all[index], live[all[index]], kBytes);
          } else {
            TrackedPool::deallocate(bench.process, all[index], kBytes, nullptr, {});
          }
        }
        over = failing::survives(place, [&] { pool.trim(); }) && !failing::failed;
        pool.trim();
        pool.trim();
        const std::size_t old = live.size();
        for (std::size_t index = 0; index < 6 * kPerSlab; ++index) {
          char* ptr = allocate(pool, kBytes, side);
          const auto after = live.lower_bound(ptr);
          const bool apart = (after == live.end() || ptr + kBytes <= after->first) &&
                             (after == live.begin() || std::prev(after)->first + kBytes <= ptr);
          expect(apart, "memory that is live was handed out");
          std::memset(ptr, 0xee, kBytes);
          live.try_emplace(ptr, 0xee);
        }
        expect(live.size() == old + 6 * kPerSlab, "blocks were handed out twice");
        for (const auto& [ptr, mark] : live) {
          const bool same = static_cast<unsigned char>(ptr[0]) == mark && std::memcmp(ptr, ptr + 1, kBytes - 1) == 0;
          expect(same, "a live block was changed");
          expect(TrackedPool::deallocate(bench.process, ptr, kBytes, nullptr, {}) == Freed::done, "a live block is not freed");
        }
        pool.trim();
        expect(pool.numbers().reserved_bytes == 0, "memory stays though no block is live");
        pool.retire();
        pool.close();
        expect(!over || place > 0, "a trim needs no memory at all");
      }
    }
  }
}

// A block is shown to a stream in the middle of the copy that moves it: `memcpy` runs into a page that is out of bounds for the
// moment, and whoever handles that shows the block and lets the copy go on.
struct {
  char* ptr = nullptr;
  char* guard = nullptr;
  TrackedPool* pool = nullptr;
  KnownStream stream;
  int count = 0;
} shown;

void show_and_go_on(int, siginfo_t* info, void*) {
  const auto* at = static_cast<const char*>(info->si_addr);
  if (at < shown.guard || at >= shown.guard + 4096 || shown.count++ != 0) std::_Exit(99);  // another fault than ours
  ::mprotect(shown.guard, 4096, PROT_READ | PROT_WRITE);
  shown.pool->record_stream(TrackedPool::find(shown.pool->process(), shown.ptr).block, shown.ptr, shown.stream);
  fake<long (*)(unsigned long long, int)>("fake_enqueue")(shown.stream.key, 0);
}

void show_while_it_is_copied() {
  struct sigaction action{};
  action.sa_sigaction = show_and_go_on;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &action, nullptr);
  constexpr std::size_t kBytes = std::size_t{4} << 20;
  for (const Track track : {Track::off, Track::counters, Track::sites}) {
    for (const bool grows : {true, false}) {
      doing = "track " + std::to_string(static_cast<int>(track)) + (grows ? ", grows" : ", shrinks");
      Bench bench;
      PoolOptions options;
      options.cautious = false;  // only what is known of is waited for
      TrackedPool& pool = bench.pool(true, options, std::make_unique<HostUpstream>(), track);
      const KnownStream stream = bench.held(pool);
      char* ptr = allocate(pool, kBytes);
      std::memset(ptr, 1, kBytes);
      const std::size_t bytes = grows ? kBytes * 3 / 2 : kBytes / 2;
      const std::size_t copied = std::min(bytes, kBytes);
      shown = {ptr, ptr + copied - 4096, &pool, stream, 0};
      ::mprotect(shown.guard, 4096, PROT_NONE);
      auto* moved = static_cast<char*>(TrackedPool::reallocate(bench.process, ptr, bytes));
      expect(shown.count == 1, "the block was not shown during the copy");
      const bool same = moved != nullptr && moved[0] == 1 && std::memcmp(moved, moved + 1, copied - 1) == 0;
      expect(same && moved != ptr, "it is not copied");
      expect(pool.numbers().quarantined_bytes == kBytes, "the block does not wait");
      for (int turn = 0; turn < 3; ++turn) {
        pool.poll();
        expect(allocate(pool, kBytes) != ptr, "the CPU has memory that a kernel touches");
      }
      fake<void (*)()>("fake_finish_all")();
      pool.poll();
      expect(pool.numbers().quarantined_bytes == 0, "the block waits though the kernel has ended");
      expect(allocate(pool, kBytes) == ptr, "the block is lost");
      if (track != Track::off) expect(pool.live_bytes() == bytes + 4 * kBytes, "live bytes are wrong");
    }
  }
}

// The last that the background thread asks: by then it has asked all whom it knows.
class Bell final : public BackgroundTask {
 public:
  Delay run() noexcept override {
    rung_.store(true);
    rung_.notify_all();
    return kNever;
  }
  void wait() noexcept { rung_.wait(false); }

 private:
  std::atomic<bool> rung_{false};
};

// No memory at one place of a pool's making after another: what was not made is known to nobody who would use it later.
void make_without_memory() {
  for (const bool ordered : {false, true}) {
    bool made = false;
    for (long place = 0; !made; ++place) {
      doing = "operator new number " + std::to_string(place) + " of making a pool fails";
      Bench bench;
      auto upstream = std::make_unique<HostUpstream>();
      TrackedPool* pool = nullptr;
      made = failing::survives(place, [&] {
        pool = new TrackedPool(bench.process, std::move(upstream), ordered ? &bench.process.driver : nullptr, bench.context, {},
                               0, 0, Track::counters);
      });
      expect(bench.process.had_pools() == made, "whether a fork knows of the pool");
      bench.process.lock_for_fork();
      bench.process.unlock_after_fork();
      auto& bell = *new Bell();
      bench.process.background.add(&bell);
      expect(bench.process.background.wake(), "there is no background thread");
      bell.wait();
      bench.process.background.stop(std::chrono::milliseconds(10'000));
      if (made) expect(allocate(*pool, 1000) != nullptr, "a pool gives nothing");
      expect(!made || place > 3, "making a pool needs hardly any memory");
      expect(place < 1000, "there is no end of failures");
    }
  }
}

// Memory that two threads come for at once wherever two do: the first waits for a second, or until no other runs.
class TogetherUpstream final : public Upstream {
 public:
  explicit TogetherUpstream(int threads) : others_(threads - 1) {}
  void* allocate(std::size_t bytes) noexcept override {
    const int mine = ++arrived_;
    while (mine % 2 == 1 && arrived_.load() == mine && resting.load() < others_) std::this_thread::yield();
    return host_.allocate(bytes);
  }
  void deallocate(void* ptr, std::size_t bytes) noexcept override { host_.deallocate(ptr, bytes); }
  bool gives_zeros() const noexcept override { return true; }
  std::size_t chunk_bytes() const noexcept override { return 0; }

  std::atomic<int> resting{0};  // threads that wait for the others

 private:
  const int others_;
  HostUpstream host_;
  std::atomic<int> arrived_{0};
};

std::size_t reserved_for(bool ordered, int threads, std::size_t bytes, long blocks) {
  Bench bench;
  auto made = std::make_unique<TogetherUpstream>(threads);
  TogetherUpstream& upstream = *made;
  upstream.resting = threads;  // while this thread is alone
  TrackedPool& pool = bench.pool(ordered, {}, std::move(made));
  if (ordered) {  // some freed memory waits for a kernel, as in most programs
    const KnownStream stream = bench.held(pool);
    for (int turn = 0; turn < 20; ++turn) {
      char* ptr = allocate(pool, 100);
      pool.record_stream(TrackedPool::find(bench.process, ptr).block, ptr, stream);
      fake<long (*)(unsigned long long, int)>("fake_enqueue")(stream.key, 0);
      TrackedPool::deallocate(bench.process, ptr, 100, nullptr, {});
    }
  }
  // One block each, and then the next: however they are scheduled, a slab that is begun has its rest when another thread comes.
  upstream.resting = 0;
  std::barrier round(threads, [&]() noexcept { upstream.resting = 0; });
  std::vector<std::thread> workers;
  for (int index = 0; index < threads; ++index) {
    workers.emplace_back([&] {
      for (long turn = 0; turn < blocks / threads; ++turn) {
        allocate(pool, bytes);
        ++upstream.resting;
        round.arrive_and_wait();
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  return pool.numbers().reserved_bytes;
}

// Threads that keep what they allocate take no more than one thread would: at most each has a piece that nobody needed.
void keep_in_threads() {
  constexpr int kThreads = 4;
  for (const bool ordered : {false, true}) {
    for (const auto& [bytes, blocks] : {std::pair<std::size_t, long>{10'000, 8000}, {40'000, 2400}, {300'000, 400}}) {
      doing = std::to_string(bytes) + " bytes, " + (ordered ? "ordered" : "plain");
      const std::size_t one = reserved_for(ordered, 1, bytes, blocks);
      const std::size_t all = reserved_for(ordered, kThreads, bytes, blocks);
      std::fprintf(stderr, "%s: %zu MiB by one thread, %zu by %d\n", doing.c_str(), one >> 20, all >> 20, kThreads);
      expect(all <= one + one / 4, "the rest of slabs is lost");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  library = argv[1];
  const std::map<std::string, void (*)()> modes = {{"trim", trim_without_memory},
                                                   {"copy", show_while_it_is_copied},
                                                   {"making", make_without_memory},
                                                   {"slabs", keep_in_threads}};
  const auto found = modes.find(argv[2]);
  if (found == modes.end()) return 2;
  found->second();
  std::printf("%d problems\n", problems);
  return problems == 0 ? 0 : 1;
}
