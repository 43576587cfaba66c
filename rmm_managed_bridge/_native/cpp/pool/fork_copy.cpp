#include "pool/fork_copy.hpp"

#include <signal.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostThreads = 8;
constexpr std::size_t kLeastCopied = std::size_t{4} << 20;  // below, a thread costs more than it spares
constexpr std::size_t kStagingBytes = std::size_t{32} << 20, kPieceBytes = std::size_t{1} << 20;
// Between blocks of the CPU's that lie so near, only blocks that were freed can lie. Without such holes a child has fewer mappings,
// of which the kernel allows it a number.
constexpr std::uintptr_t kLargestHole = kGranule / 2;
constexpr std::chrono::seconds kLongestTurn{30};
constexpr std::chrono::milliseconds kLeastPatience{100};

// A block that the CPU uses.
struct Use {
  TrackedPool* pool;
  const Block* block;
  std::uintptr_t low, high;
  bool device;  // device work may have used it last: its pages may lie there
};

// Bytes that one thread copies.
struct Item {
  const char* from;
  char* to;
  std::size_t bytes;
  bool known;
};

// Without any pool's lock: spans and their tables are never given back, so that what is read may be stale and is never garbage. With the
// gate closed what a live block lies in stays mapped.
void collect(Process& process, std::vector<Use>& uses, ForkReport& report) {
  process.pages.for_each_span([&](Span* span) {
    if (span->state.load(std::memory_order_acquire) != Span::State::blocks) return;
    auto* pool = static_cast<TrackedPool*>(span->pool);
    if (pool->kind() != kManagedKind || pool->inherited()) return;
    Block* const blocks = span->blocks.load(std::memory_order_acquire);
    const std::uint32_t count = std::min(span->block_count, span->block_capacity);
    for (std::uint32_t index = 0; index < count; ++index) {
      const Block& block = blocks[index];
      const std::uint8_t flags = block.flags.load(std::memory_order_acquire);
      const bool shown = (flags & (span->side == Side::gpu ? Block::kOnCpu : Block::kLive)) != 0;
      if ((flags & Block::kLive) == 0 || !shown) continue;
      std::size_t bytes = span->block_bytes;
      const char* start = span->block_at(index);
      Entry entry;
      if (span->large() && process.ledger.read(block.entry.load(), entry) &&
          entry.ptr == reinterpret_cast<std::uintptr_t>(start)) {
        bytes = std::min<std::size_t>(bytes, entry.bytes);
      }
      if (bytes == 0 || process.pages.find(start) != span || process.pages.find(start + bytes - 1) != span) continue;
      const auto low = reinterpret_cast<std::uintptr_t>(start);
      const bool device = pool->ordered() && (span->side == Side::gpu || (flags & Block::kShown) != 0);
      uses.push_back({pool, &block, low, low + bytes, device});
    }
  });
  report.block_count = uses.size();
  report.block_bytes = 0;
  for (const Use& use : uses) report.block_bytes += use.high - use.low;
}

// No signal is for these threads: Python's handlers are for the program's own.
template <typename Work>
void on_threads(std::size_t count, Work& work) noexcept {
  std::array<std::thread, kMostThreads> others;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::size_t begun = 0;
  try {
    for (; begun + 1 < std::min(count, kMostThreads); ++begun) others[begun] = std::thread([&work] { work(); });
  } catch (const std::exception&) {  // no more threads are to be had
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  work();
  for (std::size_t index = 0; index < begun; ++index) others[index].join();
}

// A page that both hold is left as it is: children share it.
std::size_t bring_up_to_date(const char* from, char* to, std::size_t bytes, std::size_t page_bytes) noexcept {
  std::size_t copied = 0;
  while (bytes != 0) {
    const std::size_t step = std::min(bytes, page_bytes - reinterpret_cast<std::uintptr_t>(to) % page_bytes);
    if (std::memcmp(to, from, step) != 0) {
      std::memcpy(to, from, step);
      copied += step;
    }
    from += step, to += step, bytes -= step;
  }
  return copied;
}

class Copying {
 public:
  Copying(Process& process, ForkReport& report) : process_(process), mirror_(process.forks.mirror), report_(report) {}

  // The device work on the blocks, until `until`: those whose work has ended are in `ready`.
  void wait(const std::vector<Use>& uses, Clock::time_point until);
  // From where their pages are, which they stay.
  bool copy_from_devices();
  // All others, and an end of it.
  bool copy(std::vector<Use>& uses);

  // The blocks that were left out, in order.
  std::vector<std::uintptr_t> left_out() const {
    std::vector<std::uintptr_t> blocks(left_out_.begin(), left_out_.end());
    std::ranges::sort(blocks);
    return blocks;
  }
  bool any_ready() const noexcept { return !ready_.empty(); }

 private:
  struct Pending {
    Use use;
    std::vector<EventRef> events;
  };
  void leave_out(const Use& use, ForkReport::Why why);
  char* staging(CUcontext context);
  std::vector<std::uintptr_t> fetch(TrackedPool& pool, const std::vector<Use>& uses);
  CUstream stream_of(TrackedPool& pool);
  bool finish(TrackedPool& pool, CUstream stream);
  void run(const std::vector<Item>& items) noexcept;

  Process& process_;
  ForkMirror& mirror_;
  ForkReport& report_;
  std::unordered_map<std::uintptr_t, Use> ready_;  // by address
  std::unordered_set<std::uintptr_t> left_out_;
};

void Copying::run(const std::vector<Item>& items) noexcept {
  std::atomic<std::size_t> next{0}, copied{0};
  auto work = [&] {
    std::size_t mine = 0;
    for (std::size_t index; (index = next.fetch_add(1)) < items.size();) {
      const Item& item = items[index];
      if (item.known) {
        mine += bring_up_to_date(item.from, item.to, item.bytes, mirror_.page_bytes);
      } else {
        std::memcpy(item.to, item.from, item.bytes);
        mine += item.bytes;
      }
    }
    copied.fetch_add(mine);
  };
  std::size_t total = 0;
  for (const Item& item : items) total += item.bytes;
  on_threads(std::clamp<std::size_t>(total / kLeastCopied, 1, std::min(kMostThreads, process_.limits.processors())), work);
  report_.copied_bytes += copied.load();
}

void Copying::leave_out(const Use& use, ForkReport::Why why) {
  left_out_.insert(use.low);
  if (report_.left_out_count++ == 0) {
    report_.left_out = use.low;
    report_.why = why;
  }
  report_.left_out_bytes += use.high - use.low;
}

void Copying::wait(const std::vector<Use>& uses, Clock::time_point until) {
  std::vector<Pending> pending;
  for (const Use& use : uses) {
    if (!use.device || use.pool->options().device_wait) continue;
    std::vector<EventRef> events;
    const auto* ptr = reinterpret_cast<const char*>(use.low);
    const Refusal refusal = use.pool->events_of(use.block, ptr, events, false);
    if (refusal == Refusal::none) {
      pending.push_back({use, std::move(events)});
    } else {
      leave_out(use, refusal == Refusal::capturing       ? ForkReport::Why::capturing
                     : refusal == Refusal::unheld_stream ? ForkReport::Why::unheld_stream
                                                         : ForkReport::Why::driver);
    }
  }
  for (std::chrono::microseconds pause{20};; pause = std::min(2 * pause, std::chrono::microseconds{1000})) {
    const bool late = Clock::now() >= until;
    std::erase_if(pending, [&](const Pending& each) {
      for (const EventRef& event : each.events) {
        const Ended ended = each.use.pool->events()->look(event);
        if (ended == Ended::not_yet && !late) return false;
        if (ended == Ended::yes) continue;
        leave_out(each.use, ended == Ended::not_yet ? ForkReport::Why::not_finished : ForkReport::Why::driver);
        return true;
      }
      ready_.emplace(each.use.low, each.use);
      return true;
    });
    if (pending.empty()) return;
    std::this_thread::sleep_for(pause);
  }
}

// One that no work waits for, and that waits for none.
CUstream Copying::stream_of(TrackedPool& pool) {
  std::atomic<CUstream>& slot = process_.populating[static_cast<std::size_t>(pool.device())];
  CUstream stream = slot.load();
  if (stream != nullptr) return stream;
  if (process_.driver.stream_create(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return nullptr;
  CUstream first = nullptr;
  return slot.compare_exchange_strong(first, stream) ? stream : first;  // the other one is lost: two threads began at once
}

bool Copying::finish(TrackedPool& pool, CUstream stream) {
  StreamRef ref;
  ref.handle = stream;
  ref.key = pool.events()->id_of(stream);
  EventRef event;
  return pool.events()->record(ref, event) == Recorded::done && pool.events()->synchronize(event);
}

// Pinned, so that the device writes there and nowhere else: where it can use all memory of the host, it might take pages of the mirror
// to itself. Stays for the next fork, as the mirror does.
char* Copying::staging(CUcontext context) {
  ForkState& forks = process_.forks;
  if (forks.staging == nullptr &&
      process_.driver.host_alloc(&forks.staging, kStagingBytes, CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS) {
    forks.staging = nullptr;
  }
  forks.staging_context = context;
  return static_cast<char*>(forks.staging);
}

// All of one pool, and the addresses of those that could not be copied.
std::vector<std::uintptr_t> Copying::fetch(TrackedPool& pool, const std::vector<Use>& uses) {
  const Driver& driver = process_.driver;
  const DriverScope scope(&driver, pool.events()->context());
  const CUstream stream = stream_of(pool);
  char* const buffer = stream == nullptr ? nullptr : staging(pool.events()->context());
  bool works = buffer != nullptr;
  std::size_t filled = 0;
  std::vector<Item> items;
  const auto flush = [&] {
    works = works && finish(pool, stream);
    if (works) run(items);
    items.clear();
    filled = 0;
  };
  std::vector<std::uintptr_t> failed;
  for (const Use& use : uses) {
    for (std::uintptr_t at = use.low; works && at < use.high;) {
      const std::size_t bytes = std::min(use.high - at, kStagingBytes - filled);
      if (driver.copy_to_host(buffer + filled, at, bytes, stream) != CUDA_SUCCESS) {
        failed.push_back(use.low);
        break;
      }
      for (const std::uintptr_t end = at + bytes; at < end;) {
        const ForkMirror::Part part = mirror_.part(at, std::min<std::uintptr_t>(end, at + kPieceBytes));
        items.push_back({buffer + filled, part.copy, part.bytes, part.known});
        filled += part.bytes;
        at += part.bytes;
      }
      if (filled == kStagingBytes) flush();
    }
  }
  flush();
  if (!works) {
    failed.clear();
    for (const Use& use : uses) failed.push_back(use.low);
  }
  return failed;
}

bool Copying::copy_from_devices() {
  std::unordered_map<TrackedPool*, std::vector<Use>> by_pool;
  for (const auto& [low, use] : ready_) {
    mirror_.want(low, use.high);
    by_pool[use.pool].push_back(use);
  }
  if (!mirror_.make_room()) return false;
  for (const auto& [pool, uses] : by_pool) {
    for (const std::uintptr_t low : fetch(*pool, uses)) {
      leave_out(ready_.at(low), ForkReport::Why::driver);
      ready_.erase(low);
    }
  }
  return true;
}

bool Copying::copy(std::vector<Use>& uses) {
  mirror_.begin();
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges;
  std::uintptr_t before = 0;  // where the one before ended, if that was the CPU's alone as well
  for (const Use& use : uses) {
    // There the CPU may touch nothing while the device is at work.
    if (use.pool->options().device_wait) {
      leave_out(use, ForkReport::Why::exclusive);
      before = 0;
      continue;
    }
    if (!use.device) {
      if (before == use.low) {
        ranges.back().second = use.high;
      } else {
        if (before != 0 && before < use.low && use.low - before <= kLargestHole) mirror_.want(before, use.low);
        ranges.emplace_back(use.low, use.high);
      }
      before = use.high;
      continue;
    }
    before = 0;
    if (const auto ready = ready_.find(use.low); ready != ready_.end() && ready->second.high == use.high) {
      mirror_.want(use.low, use.high);
    } else if (!left_out_.contains(use.low)) {
      leave_out(use, ForkReport::Why::not_finished);  // it came, or was shown, since
    }
  }
  for (const auto& [low, high] : ranges) mirror_.want(low, high);
  if (!mirror_.make_room()) return false;
  std::vector<Item> items;
  for (const auto& [low, high] : ranges) {
    for (std::uintptr_t at = low; at < high;) {
      const ForkMirror::Part part = mirror_.part(at, high);
      items.push_back({reinterpret_cast<const char*>(at), part.copy, part.bytes, part.known});
      at += part.bytes;
    }
  }
  run(items);
  return true;
}

// False after a long time of another thread's.
bool take_turn(Process& process) noexcept {
  const std::uint32_t mine = native_thread_id();
  ForkState& forks = process.forks;
  if (forks.turn.load() == mine) {
    ++forks.depth;
    return true;
  }
  const auto until = Clock::now() + kLongestTurn;
  const WithoutGil without(process);
  for (std::uint32_t nobody = 0; !forks.turn.compare_exchange_strong(nobody, mine); nobody = 0) {
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  forks.depth = 1;
  return true;
}

void prepare(Process& process, const ForkOptions& options, ForkReport& report) {
  ForkState& forks = process.forks;
  ForkMirror& mirror = forks.mirror;
  using Outcome = ForkReport::Outcome;
  std::vector<Use> uses;
  collect(process, uses, report);
  if (uses.empty() && mirror.empty()) return;
  report.outcome = Outcome::too_large;
  if (report.block_bytes > options.limit_bytes) return;
  Copying copying(process, report);
  mirror.begin();
  const auto begun = Clock::now();
  report.outcome = Outcome::busy;
  if (std::ranges::any_of(uses, &Use::device)) {
    const WithoutGil without(process);
    copying.wait(uses, begun + options.patience);
    if (!forks.gate.close(std::max(begun + options.patience, Clock::now() + kLeastPatience))) return;
    const bool copied = !copying.any_ready() || copying.copy_from_devices();
    forks.gate.open();
    report.outcome = Outcome::no_memory;
    if (!copied) return;
  }
  {
    const WithoutGil without(process);
    report.outcome = Outcome::busy;
    if (!forks.gate.close(Clock::now() + kLeastPatience)) return;
  }
  try {
    uses.clear();
    collect(process, uses, report);
    report.outcome = report.block_bytes > options.limit_bytes ? Outcome::too_large
                     : !copying.copy(uses)                    ? Outcome::no_memory
                                                              : Outcome::copied;
    forks.left_out = copying.left_out();
  } catch (const std::bad_alloc&) {
    report.outcome = Outcome::no_memory;
  }
  forks.gate.open();
}

// The copies go when no fork has wanted them for some time, and at once where memory is short.
class Keeper final : public BackgroundTask {
 public:
  explicit Keeper(Process& process) : process_(process) {}

  Delay run() noexcept override {
    ForkState& forks = process_.forks;
    if (!process_.running() || forks.mirror.empty()) return kNever;
    const auto left = std::chrono::nanoseconds(forks.keep_until_ns.load() - steady_time_ns());
    if (left.count() > 0 && process_.limits.look().excess_bytes == 0) {
      return std::clamp(std::chrono::ceil<Delay>(left), Delay{1}, Delay{1000});
    }
    std::uint32_t nobody = 0;
    if (!forks.turn.compare_exchange_strong(nobody, native_thread_id())) return Delay{100};
    forks.mirror.drop();
    if (void* const staging = std::exchange(forks.staging, nullptr); staging != nullptr) {
      const DriverScope scope(&process_.driver, forks.staging_context);
      process_.driver.host_free(staging);
    }
    forks.turn.store(0);
    return kNever;
  }

 private:
  Process& process_;
};

}  // namespace

ForkReport copy_for_fork(Process* process, const ForkOptions& options) noexcept {
  ForkReport report;
  if (!process->running()) return report;
  ForkState& forks = process->forks;
  report.outcome = ForkReport::Outcome::busy;
  if (!take_turn(*process)) return report;
  report.outcome = ForkReport::Outcome::nothing;
  if (forks.depth != 1) return report;  // one inside another's hooks: what that one found is there
  const auto begun = Clock::now();
  try {
    if (forks.keeper.load() == nullptr) {
      auto keeper = std::make_unique<Keeper>(*process);
      process->add_task(keeper.get());
      forks.keeper.store(keeper.release());
    }
    prepare(*process, options, report);
  } catch (const std::bad_alloc&) {
    report.outcome = ForkReport::Outcome::no_memory;
  }
  report.time_ns = std::chrono::nanoseconds(Clock::now() - begun).count();
  if (report.outcome != ForkReport::Outcome::copied) return report;
  forks.mirror.show();
  const std::size_t given = forks.mirror.wanted_bytes();
  if (given == 0) return report;
  forks.count.fetch_add(1);
  forks.bytes.fetch_add(given);
  forks.copied_bytes.fetch_add(report.copied_bytes);
  forks.time_ns.fetch_add(static_cast<std::uint64_t>(report.time_ns));
  return report;
}

void end_fork(Process* process, std::chrono::milliseconds keep) noexcept {
  ForkState& forks = process->forks;
  if (forks.turn.load() != native_thread_id() || --forks.depth != 0) return;
  forks.mirror.end();
  const bool kept = !forks.mirror.empty();
  forks.keep_until_ns.store(steady_time_ns() + std::chrono::nanoseconds(keep).count());
  forks.turn.store(0);
  if (kept && !process->background.wake()) forks.mirror.drop();
}

std::size_t inherited_bytes(Process& process, const TrackedPool::Found& found, std::size_t bytes) noexcept {
  const auto low = reinterpret_cast<std::uintptr_t>(found.start);
  const std::size_t there = process.forks.mirror.placed_bytes(low, low + bytes);
  const bool used = found.span->side == Side::cpu || (found.block->flags.load() & Block::kOnCpu) != 0;
  if (there == 0 || !used || std::ranges::binary_search(process.forks.left_out, low)) return 0;
  // The rest of a large block that is longer than what was asked for was not copied.
  return there == bytes || found.span->large() ? there : 0;
}

bool lost_in_fork(Process* process, const void* ptr, std::size_t bytes) noexcept {
  const TrackedPool::Found found = TrackedPool::find(*process, ptr);
  if (found.block == nullptr) return false;
  const auto* pool = static_cast<const TrackedPool*>(found.span->pool);
  if (!pool->inherited() || pool->kind() != kManagedKind || pool->device() < 0) return false;
  bytes += static_cast<std::size_t>(static_cast<const char*>(ptr) - static_cast<const char*>(found.start));
  return inherited_bytes(*process, found, bytes) < bytes;
}

}  // namespace rmm_bridge
