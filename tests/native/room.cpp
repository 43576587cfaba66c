// The budget of a pool, and what the kernel may refuse: with times, and a kernel, that the test makes up.
//   room budget | places | refusals | moves | random SEED
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>

#include "pool/tracked_pool.hpp"

using namespace rmm_bridge;

namespace {

constexpr std::size_t kMib = std::size_t{1} << 20;
int problems = 0;
std::string doing;

void expect(bool right, const char* what) {
  if (right) return;
  if (++problems <= 20) std::fprintf(stderr, "%s: %s\n", doing.c_str(), what);
}

// A kernel that refuses what it is told to, and counts.
struct {
  bool taken = false;  // something lies where a piece is wanted
  bool hints = false;  // it takes an address for a hint
  bool unmaps = true;  // as it is asked
  bool advises = true;
  bool maps = true;
  enum { works, fails, unmaps_first } remaps = works;
  int placed = 0, unmapped = 0, cleared = 0, moved = 0;
} kernel;

Kernel invented() {
  Kernel calls;
  calls.map = [](void* address, std::size_t bytes, int protection, int flags, int file, off_t offset) -> void* {
    if (!kernel.maps) return MAP_FAILED;
    if (address != nullptr && kernel.taken) return MAP_FAILED;
    if (address != nullptr && kernel.hints) return ::mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, file, offset);
    kernel.placed += address != nullptr;
    return ::mmap(address, bytes, protection, flags, file, offset);
  };
  calls.unmap = [](void* base, std::size_t bytes) {
    if (!kernel.unmaps) return -1;
    ++kernel.unmapped;
    return ::munmap(base, bytes);
  };
  calls.advise = [](void* base, std::size_t bytes, int advice) {
    if (!kernel.advises) return -1;
    ++kernel.cleared;
    return ::madvise(base, bytes, advice);
  };
  calls.remap = [](void* from, std::size_t from_bytes, std::size_t bytes, int flags, void* to) -> void* {
    if (kernel.remaps == kernel.unmaps_first) ::munmap(to, bytes);
    if (kernel.remaps != kernel.works) return MAP_FAILED;
    ++kernel.moved;
    return ::mremap(from, from_bytes, bytes, flags, to);
  };
  return calls;
}

TrackedPool& make_pool(PoolOptions options, Track track = Track::counters) {
  static Process& process = *new Process();  // never freed, as in a program
  auto upstream = std::make_unique<HostUpstream>(true, invented());
  return *new TrackedPool(process, std::move(upstream), nullptr, nullptr, options, -1, kHostKind, track);
}

char* allocate(TrackedPool& pool, std::size_t bytes) {
  Refusal refusal;
  return static_cast<char*>(pool.allocate({.bytes = bytes, .alignment = kCpuUnit}, refusal));
}

void free(TrackedPool& pool, char* ptr) {
  expect(TrackedPool::deallocate(pool.process(), ptr, TrackedPool::kUnstated, nullptr, {}) == Freed::done,
         "a block is not freed");
}

void end(TrackedPool& pool) {
  pool.retire();
  expect(pool.close() && pool.numbers().reserved_bytes == 0, "the pool does not end");
}

bool is(const char* ptr, std::size_t bytes, unsigned char mark) {
  return static_cast<unsigned char>(ptr[0]) == mark && std::memcmp(ptr, ptr + 1, bytes - 1) == 0;
}

// What counts as recent, by a clock that the test sets.
void budget_by_the_clock() {
  PoolBudget budget(100);
  expect(budget.bytes(0) == PoolBudget::kSpareBytes, "of a pool that has nothing");
  budget.roll(1000, 10);
  budget.note(50);
  budget.note(20);
  expect(budget.bytes(20) == 2 * 50 + PoolBudget::kSpareBytes, "the most that was live counts");
  expect(budget.bytes(70) == 2 * 70 + PoolBudget::kSpareBytes, "what is about to be live counts");
  budget.roll(1099, 5);
  expect(budget.bytes(0) == 2 * 50 + PoolBudget::kSpareBytes, "a period is not over");
  budget.roll(1100, 7);
  expect(budget.bytes(0) == 2 * 50 + PoolBudget::kSpareBytes, "the last period counts");
  budget.roll(1199, 6);
  expect(budget.bytes(0) == 2 * 50 + PoolBudget::kSpareBytes, "the last period counts to the end of this one");
  budget.roll(1200, 4);
  expect(budget.bytes(0) == 2 * 7 + PoolBudget::kSpareBytes, "the one before the last is forgotten");
  budget.roll(9000, 3);
  budget.roll(9100, 3);
  expect(budget.bytes(0) == 2 * 3 + PoolBudget::kSpareBytes, "nobody asked for long");
  expect(budget.bytes(~std::size_t{0} / 2) == ~std::size_t{0}, "it does not wrap");
}

// Pieces lie side by side where the kernel lets them, begin at huge pages, and all is well where it does not.
void places() {
  for (const int way : {0, 1, 2}) {
    doing = way == 0 ? "a kernel that does" : way == 1 ? "a place is taken" : "an address is a hint";
    kernel = {};
    kernel.taken = way == 1;
    kernel.hints = way == 2;
    HostUpstream upstream(true, invented());
    std::map<char*, std::size_t> pieces;
    for (const std::size_t bytes : {64 * kMib, 16 * kMib, 18 * kMib, 64 * kMib + kGranule, 2 * kMib}) {
      char* base = static_cast<char*>(upstream.allocate(bytes));
      expect(base != nullptr && reinterpret_cast<std::uintptr_t>(base) % kHugePage == 0, "a piece does not begin at a huge page");
      if (base == nullptr) return;
      base[0] = base[bytes - 1] = 1;
      pieces[base] = bytes;
    }
    int neighbours = 0;
    for (auto it = pieces.begin(); std::next(it) != pieces.end(); ++it) {
      expect(it->first + it->second <= std::next(it)->first, "pieces overlap");
      neighbours += it->first + it->second == std::next(it)->first;
    }
    if (way == 0) expect(kernel.placed >= 2 && neighbours >= 2, "no pieces are neighbours");
    for (const auto& [base, bytes] : pieces) expect(upstream.release(base, bytes), "a piece does not go back");
  }
}

// What does not go back stays, reads as zeros, and is used again; nothing is lost and nothing is counted that did not happen.
void refusals() {
  for (const bool clears : {true, false}) {
    doing = clears ? "no unmapping" : "no unmapping, and pages are not dropped";
    kernel = {};
    TrackedPool& pool = make_pool({.budget = true});
    char* kept = allocate(pool, 3 * kMib);
    char* block = allocate(pool, 40 * kMib);
    std::memset(kept, 7, 3 * kMib);
    std::memset(block, 9, 40 * kMib);
    free(pool, block);
    const std::size_t reserved = pool.numbers().reserved_bytes;
    const std::uint64_t given_back = pool.process().given_back.load();
    kernel.unmaps = false;
    kernel.advises = clears;
    expect(pool.trim() == 0 && pool.numbers().reserved_bytes == reserved, "what did not go back is not reserved");
    expect(pool.process().given_back.load() == given_back, "what did not go back is counted");
    Refusal refusal;
    bool zeroed = false;
    auto* again = static_cast<char*>(pool.allocate({.bytes = 40 * kMib, .alignment = kCpuUnit}, refusal, &zeroed));
    expect(again != nullptr && pool.numbers().reserved_bytes == reserved, "what did not go back is not used");
    expect(zeroed == clears && (!zeroed || is(again, 40 * kMib, 0)), "whether it is zero");
    if (!zeroed) pool.fill_with_zeros(again, 40 * kMib);
    expect(is(again, 40 * kMib, 0), "zeros that the kernel does not make are not written");
    expect(is(kept, 3 * kMib, 7), "a live block was changed");
    kernel.unmaps = kernel.advises = true;
    free(pool, again);
    free(pool, kept);
    end(pool);
  }
  doing = "no mapping";
  kernel = {};
  TrackedPool& pool = make_pool({.budget = true});
  char* block = allocate(pool, 100 * kMib);
  free(pool, block);
  kernel.maps = false;
  expect(allocate(pool, 300 * kMib) == nullptr, "there is memory");
  kernel.maps = true;
  block = allocate(pool, 300 * kMib);
  expect(block != nullptr && pool.numbers().used_bytes >= 300 * kMib, "there is none");
  free(pool, block);
  end(pool);
}

// Large blocks change their size where they are, or with their pages; what the kernel refuses is copied.
void moves() {
  for (const Track track : {Track::off, Track::counters}) {
    for (const auto remaps : {kernel.works, kernel.fails, kernel.unmaps_first}) {
      doing = "track " + std::to_string(static_cast<int>(track)) + ", remaps " + std::to_string(static_cast<int>(remaps));
      kernel = {};
      TrackedPool& pool = make_pool({.budget = true}, track);
      char* block = allocate(pool, 10 * kMib);
      std::memset(block, 5, 10 * kMib);
      char* there = block;
      for (std::size_t bytes = 10 * kMib; bytes <= 40 * kMib; bytes += 300'000) {
        auto* now = static_cast<char*>(TrackedPool::reallocate(pool.process(), there, bytes));
        expect(now == there, "a block moves though there is room behind it");
        there = now;
      }
      expect(is(there, 10 * kMib, 5), "what was in it is lost");
      there = static_cast<char*>(TrackedPool::reallocate(pool.process(), there, 12 * kMib));
      char* tail = allocate(pool, 20 * kMib);
      expect(there == block && tail != nullptr && pool.numbers().reserved_bytes == 64 * kMib, "its tail is not free");
      kernel.remaps = remaps;
      std::size_t live = 12 * kMib;
      for (const std::size_t bytes : {100 * kMib, 150 * kMib + 1000, 400 * kMib}) {
        auto* now = static_cast<char*>(TrackedPool::reallocate(pool.process(), there, bytes));
        if (now == nullptr) return expect(false, "a block cannot grow");
        live = bytes;
        there = now;
        expect(reinterpret_cast<std::uintptr_t>(there) % kGranule == 0, "it is not aligned");
        expect(is(there, 10 * kMib, 5) && TrackedPool::find(pool.process(), there + bytes - 1).start == there, "it is not whole");
        there[bytes - 1] = 1;
        const PoolNumbers now_are = pool.numbers();
        expect(now_are.used_bytes >= live + 20 * kMib && now_are.used_bytes <= (live + 20 * kMib) * 9 / 8, "used bytes");
        expect(now_are.reserved_bytes <= 2 * (live + 20 * kMib) + 64 * kMib, "more is reserved than the budget");
        if (track != Track::off) expect(pool.live_bytes() == live + 20 * kMib, "live bytes");
      }
      expect((kernel.moved != 0) == (remaps == kernel.works), "its pages are copied");
      expect(pool.live_count() == 2, "how many are live");
      free(pool, there);
      free(pool, tail);
      end(pool);
    }
  }
}

// Blocks in phases, growing and shrinking, as programs have them. No memory is touched, so that this is fast.
class Program {
 public:
  explicit Program(unsigned seed) : random_(seed) { kernel = {}; }

  void run() {
    for (int phase = 0; phase < 6 && problems == 0; ++phase) {
      doing = "phase " + std::to_string(phase);
      const unsigned kind = random_() % 4;
      const std::size_t most = (1 + random_() % 300) * kMib;
      for (int step = 0; step < 60; ++step) {
        const std::size_t share = kind == 0 ? step : kind == 1 ? 60 - step : random_() % 60;
        take(1 + most * share / 60);
        while (!live_.empty() && (live_.size() > 1 + random_() % 12 || live_bytes_ > (std::size_t{1} << 30))) drop();
        if (kind == 3 && !live_.empty()) resize();
      }
      while (live_.size() > random_() % 4) drop();
    }
    while (!live_.empty()) drop();
    end(pool_);
  }

 private:
  void take(std::size_t bytes) {
    if (random_() % 3 == 0) bytes = 1 + bytes % (3 * kMib);
    char* ptr = allocate(pool_, bytes);
    if (ptr == nullptr) return expect(false, "there is no memory");
    live_[ptr] = bytes;
    note(bytes, 0);
  }
  void drop() {
    const auto it = std::next(live_.begin(), static_cast<std::ptrdiff_t>(random_() % live_.size()));
    free(pool_, it->first);
    note(0, it->second);
    live_.erase(it);
  }
  void resize() {
    const auto it = std::next(live_.begin(), static_cast<std::ptrdiff_t>(random_() % live_.size()));
    const std::size_t bytes = 1 + it->second * (50 + random_() % 100) / 100, before = it->second;
    char* now = static_cast<char*>(TrackedPool::reallocate(pool_.process(), it->first, bytes));
    if (now == nullptr) return expect(false, "a block cannot change its size");
    live_.erase(it);
    live_[now] = bytes;
    // Where it is copied, both are live for a moment.
    peak_bytes_ = std::max(peak_bytes_, live_bytes_ + bytes);
    note(bytes, before);
  }
  void note(std::size_t more, std::size_t fewer) {
    live_bytes_ += more - fewer;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    const PoolNumbers now = pool_.numbers();
    expect(now.asked_bytes == live_bytes_, "what is live");
    expect(now.reserved_bytes <= 2 * peak_bytes_ + 128 * kMib, "more is reserved than was promised");
  }

  std::mt19937 random_;
  TrackedPool& pool_ = make_pool({.budget = true});
  std::map<char*, std::size_t> live_;
  std::size_t live_bytes_ = 0, peak_bytes_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "budget") {
    budget_by_the_clock();
  } else if (mode == "places") {
    places();
  } else if (mode == "refusals") {
    refusals();
  } else if (mode == "moves") {
    moves();
  } else if (mode == "random" && argc == 3) {
    Program(static_cast<unsigned>(std::atoi(argv[2]))).run();
  } else {
    return 2;
  }
  std::printf("%d problems\n", problems);
  return problems == 0 ? 0 : 1;
}
