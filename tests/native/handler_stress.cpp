// NumPy's four functions from many threads, for ThreadSanitizer and AddressSanitizer: blocks are resized, and freed by
// other threads than their makers', while one thread installs, uninstalls, trims and reads. No Python is linked.
//   handler_stress THREADS STEPS
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "entry/numpy_state.hpp"

using namespace rmm_bridge;

namespace {

// Stands for the interpreter: half of the callers hold the GIL, and nobody has a call site.
struct NoPython {
  static inline thread_local bool gil = false;
  static bool holds_gil() noexcept { return gil; }
  Provenance capture(std::uint8_t framework, Track) noexcept { return {0, 0, framework}; }
};
using Guest = NumpyState<NoPython>;
using Entries = NumpyEntries<Guest>;

struct Held {
  unsigned char* ptr;
  std::size_t bytes;
  unsigned char value;
};

std::mutex shared_mutex;
std::deque<Held> shared;  // blocks that any thread may free
std::atomic<int> problems{0};
std::atomic<bool> over{false};

void fail(const char* what, const void* ptr) {
  std::fprintf(stderr, "%s at %p\n", what, ptr);
  ++problems;
}

// Every byte of small blocks; of large ones the ends, and a byte of each page between.
template <typename Visit>
void for_each_mark(std::size_t bytes, Visit visit) {
  const std::size_t edge = std::min<std::size_t>(bytes, 256);
  for (std::size_t i = 0; i < edge; ++i) visit(i);
  for (std::size_t i = 4096; i < bytes; i += 4096) visit(i);
  for (std::size_t i = bytes - edge; i < bytes; ++i) visit(i);
}

void mark(const Held& held) {
  for_each_mark(held.bytes, [&](std::size_t i) { held.ptr[i] = held.value; });
}

void check(const Held& held, std::size_t bytes, unsigned char value) {
  bool good = true;
  for_each_mark(bytes, [&](std::size_t i) { good = good && held.ptr[i] == value; });
  if (!good) fail("a block was changed", held.ptr);
}

void give(Guest& guest, const Held& held) {
  check(held, held.bytes, held.value);
  Entries::free(&guest, held.ptr, held.bytes);
}

void work(Guest& guest, unsigned seed, long steps) {
  std::mt19937 random(seed);
  NoPython::gil = seed % 2 == 0;
  std::vector<Held> mine;
  const auto size = [&] { return static_cast<std::size_t>(std::exp2(std::uniform_real_distribution<>(0, 23)(random))); };
  for (long step = 0; step < steps; ++step) {
    const unsigned what = random() % 100;
    if (mine.size() < 4 && what < 50) {
      Held held{nullptr, size(), static_cast<unsigned char>(1 + random() % 255)};
      const bool zeros = random() % 3 == 0;
      held.ptr =
          static_cast<unsigned char*>(zeros ? Entries::calloc(&guest, 1, held.bytes) : Entries::malloc(&guest, held.bytes));
      if (held.ptr == nullptr) continue;
      if (reinterpret_cast<std::uintptr_t>(held.ptr) % 16 != 0) fail("a block is not aligned", held.ptr);
      if (zeros) check(held, held.bytes, 0);
      mark(held);
      mine.push_back(held);
    } else if (what < 70 && !mine.empty()) {
      Held& held = mine[random() % mine.size()];
      check(held, held.bytes, held.value);
      const std::size_t bytes = size();
      auto* moved = static_cast<unsigned char*>(Entries::realloc(&guest, held.ptr, bytes));
      if (moved == nullptr) {
        check(held, held.bytes, held.value);  // a failure leaves it whole
        continue;
      }
      held.ptr = moved;
      const std::size_t kept = std::min<std::size_t>({held.bytes, bytes, 256});
      bool good = true;
      for (std::size_t i = 0; i < kept; ++i) good = good && moved[i] == held.value;
      if (!good) fail("contents were lost", moved);
      held.bytes = bytes;
      mark(held);
    } else if (what < 85 && !mine.empty()) {
      std::swap(mine[random() % mine.size()], mine.back());
      give(guest, mine.back());
      mine.pop_back();
    } else if (!mine.empty()) {
      std::scoped_lock lock(shared_mutex);
      shared.push_back(mine.back());
      mine.pop_back();
    }
    Held other{};
    {
      std::scoped_lock lock(shared_mutex);
      if (shared.size() < 8) continue;
      other = shared.front();
      shared.pop_front();
    }
    give(guest, other);
  }
  for (const Held& held : mine) give(guest, held);
}

// What the rest of the bridge does meanwhile.
void disturb(Guest& guest, Process& process, TrackedPool& first, TrackedPool& second) {
  for (unsigned turn = 0; !over.load(); ++turn) {
    TrackedPool* const choices[] = {&first, &first, &second, nullptr};
    guest.pool.store(choices[turn % 4]);
    guest.least_bytes.store(turn % 8 == 0 ? 1024 : 0);
    if (turn % 4 == 1) first.trim();
    first.numbers();
    std::size_t count = 0;
    process.ledger.for_each([&](const Entry&) { ++count; });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int threads = std::atoi(argv[1]);
  auto& process = *new Process();
  process.history.set_limit(1000);
  process.record_all_events(true);
  const auto pool = [&](std::size_t limit, Track track) {
    PoolOptions options;
    options.limit_bytes = limit;
    options.hugepages = true;
    options.budget = true;
    options.spare_bytes = 0;
    return new TrackedPool(process, std::make_unique<HostUpstream>(), nullptr, nullptr, options, -1, 0, track);
  };
  TrackedPool& first = *pool(std::size_t{128} << 20, Track::sites);  // small enough to refuse now and then
  TrackedPool& second = *pool(std::size_t{1} << 30, Track::off);
  NoPython origin;
  auto& guest = *new Guest();
  guest.process = &process;
  guest.origin = &origin;
  guest.framework = 1;
  guest.pool.store(&first);
  std::vector<std::thread> workers;
  for (int index = 0; index < threads; ++index) workers.emplace_back(work, std::ref(guest), 17 + index, std::atol(argv[2]));
  std::thread disturber(disturb, std::ref(guest), std::ref(process), std::ref(first), std::ref(second));
  for (std::thread& worker : workers) worker.join();
  over.store(true);
  disturber.join();
  for (const Held& held : shared) give(guest, held);
  guest.pool.store(nullptr);
  for (TrackedPool* each : {&first, &second}) {
    if (each->live_count() != 0 || each->live_bytes() != 0) fail("blocks are left", each);
    each->retire();
    if (!each->close()) fail("a pool does not close", each);
  }
  if (process.ledger.current_bytes() != 0) fail("the ledger is not empty", &process);
  if (process.foreign_frees.load() != 0) fail("a free was refused", &process);
  if (process.hugepages.advised_bytes.load() != 0) fail("advice is left", &process);
  std::printf("%d problems\n", problems.load());
  return problems.load() == 0 ? 0 : 1;
}
