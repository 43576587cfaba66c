// One program again and again, in which the first, the second, ... operator new of the core fails: nothing ends the process,
// nobody gets memory that is another's or not zeroed as promised, and in the end every count is zero.
//   no_memory FAKE_DRIVER_LIBRARY
#include "failing_new.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "pool/hint_calls.hpp"

using namespace rmm_bridge;
using failing::armed;
using failing::failed;
using failing::until_failure;

namespace {

int problems = 0;
long round_number = 0;

void fail(const char* what) {
  std::fprintf(stderr, "failure %ld: %s\n", round_number, what);
  ++problems;
}

// Calls the core. What it may throw is std::bad_alloc, and only from functions that say so.
template <typename Call>
void armed_call(Call call) {
  armed = true;
  try {
    call();
  } catch (const std::bad_alloc&) {
  }
  armed = false;
}

struct Held {
  unsigned char* ptr = nullptr;
  std::size_t bytes = 0;
  unsigned char mark = 0;
};

class Program {
 public:
  Program(Process& process, TrackedPool& pool, CUstream owned, CUstream borrowed)
      : process_(process), pool_(pool), owned_(owned), borrowed_(borrowed) {}

  void run() {
    static int owner;
    KnownStream ref;
    armed_call([&] {
      pool_.resolve(owned_, ref);
      if (pool_.ordered()) pool_.hold(ref, &owner);
    });
    for (std::size_t bytes : {std::size_t{64}, std::size_t{4096}, std::size_t{300'000}, std::size_t{5'000'000}}) {
      for (int turn = 0; turn < 3; ++turn) {
        take(bytes, nullptr);
        take(bytes, &owned_);
        take(bytes, &borrowed_);
      }
      for (std::size_t index = 0; index < held_.size(); index += 2) give(index, index % 4 == 0);
    }
    for (Held& each : held_) {
      if (each.ptr == nullptr) continue;
      const TrackedPool::Found found = TrackedPool::find(process_, each.ptr);
      armed_call([&] { pool_.record_stream(found.block, reinterpret_cast<char*>(each.ptr), ref); });
      armed_call([&] { pool_.synchronize(found.block, reinterpret_cast<char*>(each.ptr)); });
    }
    resize();
    // More than a batch of CPU blocks, freed while streams are held.
    for (int turn = 0; turn < 40; ++turn) {
      const std::size_t first = count_;
      while (count_ < held_.size()) take(2048, nullptr);
      for (std::size_t index = first; index < held_.size(); ++index) give(index, false);
      count_ = first;
    }
    trim_half_live(nullptr);
    trim_half_live(&owned_);
    armed_call([&] { pool_.trim(); });
    take(4096, nullptr);
    armed_call([&] { pool_.poll(); });
    for (std::size_t index = 0; index < held_.size(); ++index) give(index, index % 2 == 0);
  }

 private:
  // Trims that meet one slab whose blocks are all free and one of which half are live, and once more from where the first has left
  // off. What is handed out after that is nobody's: `give` looks at every block.
  void trim_half_live(const CUstream* stream) {
    constexpr std::size_t kBytes = 512 << 10, kPerSlab = 8;
    const std::size_t first = count_;
    for (std::size_t turn = 0; turn < 2 * kPerSlab; ++turn) take(kBytes, stream);
    for (std::size_t index = first; index < std::min(first + 3 * kPerSlab / 2, count_); ++index) give(index, stream != nullptr);
    armed_call([&] { pool_.trim(); });
    armed_call([&] { pool_.trim(); });
    for (std::size_t turn = 0; turn < kPerSlab; ++turn) take(kBytes, stream);
    for (std::size_t index = first; index < count_; ++index) give(index, stream != nullptr);
    count_ = first;
  }

  void take(std::size_t bytes, const CUstream* stream) {
    if (count_ == held_.size()) return;
    Held& held = held_[count_];
    bool zeroed = false;
    Refusal refusal = Refusal::none;
    const Request request{.bytes = bytes,
                          .alignment = 64,
                          .side = stream == nullptr ? Side::cpu : Side::gpu,
                          .host_ordered = stream == nullptr,
                          .stream = stream == nullptr ? nullptr : *stream};
    armed_call([&] { held.ptr = static_cast<unsigned char*>(pool_.allocate(request, refusal, &zeroed)); });
    if (held.ptr == nullptr) return;
    if (stream == &borrowed_) armed_call([&] { pool_.prefetch_new(held.ptr, bytes, *stream); });
    held.bytes = bytes;
    if (zeroed && !all(held.ptr, end_bytes(held), 0)) fail("zeroed memory is not");
    mark(held);
    ++count_;
  }

  // The first and the last bytes: touching all pages of large blocks takes most of the time.
  static std::size_t end_bytes(const Held& held) { return std::min<std::size_t>(held.bytes, 4096); }

  static bool all(const unsigned char* from, std::size_t bytes, unsigned char value) {
    return from[0] == value && std::memcmp(from, from + 1, bytes - 1) == 0;
  }

  void mark(Held& held) {
    held.mark = ++last_mark_ == 0 ? ++last_mark_ : last_mark_;
    const std::size_t bytes = end_bytes(held);
    std::memset(held.ptr, held.mark, bytes);
    std::memset(held.ptr + held.bytes - bytes, held.mark, bytes);
  }

  void check(const Held& held) {
    const std::size_t bytes = end_bytes(held);
    if (!all(held.ptr, bytes, held.mark) || !all(held.ptr + held.bytes - bytes, bytes, held.mark)) fail("a block was changed");
  }

  void give(std::size_t index, bool on_stream) {
    Held& held = held_[index];
    if (held.ptr == nullptr) return;
    check(held);
    Freed freed = Freed::done;
    armed_call([&] { freed = TrackedPool::deallocate(process_, held.ptr, held.bytes, on_stream ? &owned_ : nullptr, {}); });
    if (freed != Freed::done) fail("a free was refused");
    held = {};
  }

  void resize() {
    for (Held& held : held_) {
      if (held.ptr == nullptr || TrackedPool::find(process_, held.ptr).span->side != Side::cpu) continue;
      check(held);
      void* moved = nullptr;
      armed_call([&] { moved = TrackedPool::reallocate(process_, held.ptr, held.bytes + 5000); });
      if (moved != nullptr) {
        held.ptr = static_cast<unsigned char*>(moved);
        if (held.ptr[0] != held.mark || held.ptr[held.bytes - 1] != held.mark) fail("a resized block lost its bytes");
        held.bytes += 5000;
        mark(held);
      } else {
        check(held);
      }
    }
  }

  Process& process_;
  TrackedPool& pool_;
  CUstream owned_, borrowed_;
  std::array<Held, 64> held_{};
  std::size_t count_ = 0;
  unsigned char last_mark_ = 0;
};

TrackedPool* relieved_pool = nullptr;

// As a callback of the user's would: it makes room by what takes memory itself for a while.
bool relieve(std::size_t bytes, int attempt, bool) {
  if (attempt != 0) return false;
  const bool was_armed = std::exchange(armed, false);
  Refusal refusal;
  if (void* ptr = relieved_pool->allocate(Request{.bytes = bytes, .alignment = 64}, refusal); ptr != nullptr) {
    std::memset(ptr, 0xff, std::min<std::size_t>(bytes, 4096));
    TrackedPool::deallocate(relieved_pool->process(), ptr, TrackedPool::kUnstated, nullptr, {});
  }
  armed = was_armed;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  do {
    failed = false;
    until_failure = round_number;
    // All of it anew, and never freed: what is there already is not asked for again.
    auto& process = *new Process();
    process.driver.load(argv[1]);
    CUcontext context = nullptr;
    if (!process.driver.loaded || process.driver.primary_retain(&context, 0) != CUDA_SUCCESS) return 3;
    process.driver.ctx_push(context);
    process.relieve = relieve;
    CUstream owned, borrowed;
    process.driver.stream_create(&owned, CU_STREAM_NON_BLOCKING);
    process.driver.stream_create(&borrowed, CU_STREAM_NON_BLOCKING);
    // Where no device works, what is freed is used again at once; elsewhere it waits.
    for (const Driver* driver : {static_cast<const Driver*>(nullptr), static_cast<const Driver*>(&process.driver)}) {
      auto& pool =
          *new TrackedPool(process, std::make_unique<HostUpstream>(), driver, context, PoolOptions{}, 0, 1, Track::counters);
      relieved_pool = &pool;
      Program(process, pool, owned, borrowed).run();
      if (pool.live_count() != 0 || pool.live_bytes() != 0) fail("blocks are left");
      if (process.ledger.current_bytes() != 0) fail("the ledger has entries");
      if (process.hints.size() != 0) fail("hints are left");
      pool.retire();
      pool.close();
    }
    ++round_number;
  } while (failed && round_number < 10'000);
  if (failed) fail("there is no end of failures");
  std::fprintf(stderr, "%ld rounds\n", round_number);
  std::printf("%d problems\n", problems);
  return problems == 0 ? 0 : 1;
}
