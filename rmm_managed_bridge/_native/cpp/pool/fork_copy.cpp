#include "pool/fork_copy.hpp"

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "pool/fork_copying.hpp"

namespace rmm_bridge {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLongestTurn{30};
constexpr std::chrono::milliseconds kLeastPatience{100};

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

// The gate is closed as long as one lives that could close it.
class Closed {
 public:
  Closed(UpstreamGate& gate, Clock::time_point until) noexcept : gate_(gate), closed_(gate.close(until)) {}
  ~Closed() {
    if (closed_) gate_.open();
  }
  Closed(const Closed&) = delete;
  Closed& operator=(const Closed&) = delete;
  explicit operator bool() const noexcept { return closed_; }

 private:
  UpstreamGate& gate_;
  const bool closed_;
};

void prepare(Process& process, const ForkOptions& options, ForkReport& report) {
  ForkState& forks = process.forks;
  ForkMirror& mirror = forks.mirror;
  using Outcome = ForkReport::Outcome;
  std::vector<ForkUse> uses;
  collect_for_fork(process, uses, report);
  if (uses.empty() && mirror.empty()) return;
  report.outcome = Outcome::too_large;
  if (report.block_bytes > options.limit_bytes) return;
  ForkCopying copying(process, report);
  mirror.begin();
  const auto begun = Clock::now();
  report.outcome = Outcome::busy;
  if (std::ranges::any_of(uses, &ForkUse::device)) {
    const WithoutGil without(process);
    copying.wait(uses, begun + options.patience);
    const Closed closed(forks.gate, std::max(begun + options.patience, Clock::now() + kLeastPatience));
    if (!closed) return;
    report.outcome = Outcome::no_memory;
    if (copying.any_ready() && !copying.copy_from_devices()) return;
  }
  report.outcome = Outcome::busy;
  std::optional<Closed> closed;
  {
    const WithoutGil without(process);
    closed.emplace(forks.gate, Clock::now() + kLeastPatience);
  }
  if (!*closed) return;
  uses.clear();
  collect_for_fork(process, uses, report);
  report.outcome = report.block_bytes > options.limit_bytes ? Outcome::too_large
                   : !copying.copy(uses)                    ? Outcome::no_memory
                                                            : Outcome::copied;
  forks.left_out = copying.left_out();
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
    void* const staging = std::exchange(forks.staging, nullptr);
    const CUcontext context = forks.staging_context;
    forks.turn.store(0);
    if (staging != nullptr) {  // which may wait for the device, and no fork for that
      const DriverScope scope(&process_.driver, context);
      process_.driver.host_free(staging);
    }
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
