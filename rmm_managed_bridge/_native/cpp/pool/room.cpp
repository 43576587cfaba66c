// Pool, the part about its budget: how much it takes from upstream, and what goes back so that no more is kept than the program used
// lately. docs/design/pool.md has the reasons and what each constant costs.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/threads.hpp"
#include "pool/pool.hpp"

namespace rmm_bridge {

namespace {

constexpr std::size_t kMib = std::size_t{1} << 20;
constexpr std::size_t kLeastPiece = 16 * kMib;
constexpr std::size_t kLeastDropped =
    32 * kMib;                               // malloc's own threshold: below, writing zeros costs less than taking pages again
constexpr std::size_t kWatched = 64 * kMib;  // the thread sleeps while no more is reserved
constexpr std::size_t kGivenAtOnce = 64 * kMib;  // by a device: freeing stops its launches meanwhile
constexpr std::size_t kPageBytes = 64 << 10;     // a multiple of what pages have anywhere
// Managed memory that the CPU writes first takes a fault for each page: 4 GB/s with one thread, 24 to 32 with four and 50 with eight on
// a host of 16 cores (docs/design/measured.md).
constexpr std::size_t kLeastShared = 8 * kMib;
constexpr std::size_t kLeastShare = 4 * kMib;  // of one thread, which takes some 20 us to begin

void write_zeros(char* ptr, std::size_t bytes, std::size_t writers) noexcept {
  const std::size_t share = (bytes / writers + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t at; (at = next.fetch_add(share)) < bytes;) std::memset(ptr + at, 0, std::min(share, bytes - at));
  };
  on_threads(writers, work);
}

}  // namespace

// The fronts have counts that are not here yet, so that frees may have come before their allocations.
std::size_t Pool::live_now() const noexcept {
  const auto live = static_cast<std::ptrdiff_t>(options_.counts_asked ? asked_bytes_ : used_bytes_);
  return static_cast<std::size_t>(std::max<std::ptrdiff_t>(live, 0));
}

std::size_t Pool::budget_for(std::size_t more_bytes) const noexcept {
  return std::min(options_.limit_bytes, std::max(options_.least_budget_bytes, budget_.bytes(live_now() + more_bytes)));
}

// By how much the budget would be passed with a piece of so many bytes for a request of `asked` more.
std::size_t Pool::above_budget(std::size_t piece_bytes, std::size_t asked) const noexcept {
  const std::size_t budget = budget_for(asked);
  return reserved_bytes_ + piece_bytes - std::min(reserved_bytes_ + piece_bytes, budget);
}

// With a request that is about to be live: what is taken for it is not above the budget, whoever looks before it has it.
void Pool::look_at_clock(std::size_t asked) noexcept {
  drain_all();
  budget_.roll(steady_time_ns(), live_now() + asked);
}

// What to take from upstream for a request. On devices taking costs the same for any size.
std::size_t Pool::piece_for(const Want& want) const noexcept {
  const std::size_t need = slabs_.next_span_bytes(want.side, want.size);
  if (chunk_bytes_ == 0) return need;
  std::size_t piece = std::max(need, chunk_bytes_);
  if (budgeted_) {
    const std::size_t budget = budget_for(want.asked_bytes);
    const std::size_t usual = ordered() ? std::max(chunk_bytes_, reserved_bytes_ / 4) : chunk_bytes_;
    const std::size_t taken = reserved_bytes_ + (parts_ ? 0 : kGranule);  // which it may need to be aligned in
    const std::size_t room = (budget - std::min(budget, taken)) / kGranule * kGranule;
    piece = std::max({need, std::min(usual, ordered() ? room / 2 : room), kLeastPiece});  // the other side may need as much
  }
  // What a piece has too much is of one side, and in devices' pieces that may be for good: at the limit only what is needed is taken.
  const std::size_t left = options_.limit_bytes - std::min(options_.limit_bytes, reserved_bytes_);
  if (parts_) {
    piece = std::max(need, std::min(piece, left / kHugePage * kHugePage));
  } else if (piece > left / 4) {
    piece = std::max(need, kLeastPiece <= left / 4 ? kLeastPiece : 0);
  }
  const std::size_t step = parts_ && need <= left / kHugePage * kHugePage ? kHugePage : kGranule;
  return (piece + step - 1) / step * step;
}

void Pool::free_idle_slabs() noexcept {
  for (Side side : {Side::cpu, Side::gpu}) {
    Lane& ready = lanes_.at(ready_lane(side));
    drain(ready);
    ready.free_bytes -= slabs_.give_idle(side, ready.bins);
  }
}

// Before growth beyond the budget: what can be had is looked for once more, and on the host as much goes back as is above. On devices
// nothing does, since that would wait for their work. True if `want` could be served.
bool Pool::make_room(const Want& want, Grant& out) {
  if (!budgeted_) return false;
  const bool within = with_lock([&] {
    look_at_clock(want.asked_bytes);
    return above_budget(piece_for(want), want.asked_bytes) == 0;
  });
  if (within) return false;
  if (ordered()) settle_large_blocks();
  const bool served = with_lock([&] {
    free_idle_slabs();
    return take_idle(want, out) || take_new(want, out, false);
  });
  if (served) return true;
  if (!ordered()) give_back(with_lock([&] { return above_budget(piece_for(want), want.asked_bytes); }));
  return false;
}

// Large blocks leave the lanes that they were freed on: behind an event they join, and may become blocks of another size.
void Pool::settle_large_blocks() {
  static const std::uint32_t kFirst = size_class(kLargestSmall + 1, kGpuUnit).index;
  flush_deferred();
  std::vector<std::uint16_t> lanes;
  with_lock([&] {
    lanes_.for_each_stream([&](Lane& lane) {
      drain(lane);
      if (lane.held() && lane.free_bytes > kLargestSmall) lanes.push_back(lane.index);
    });
  });
  for (const std::uint16_t index : lanes) {
    InHand in_hand(*this);
    Pins pins(*this);
    std::vector<Block*> blocks;
    std::size_t bytes = 0;
    StreamRef stream;
    {
      std::scoped_lock lock(lock_);
      Lane& lane = lanes_.at(index);
      if (!lane.held()) continue;
      pins.add(lane);
      stream = lane.stream;
      bytes = take_large(lane, kFirst, blocks);
      if (bytes != 0) in_hand.begin();
    }
    if (blocks.empty()) continue;
    try {
      EventRef event;
      const WithoutGil without(process_);
      events_->record(stream, event);  // without one, `poll` tries again once the capture may be over
      std::scoped_lock lock(lock_);
      quarantine(std::move(blocks), bytes, {{index, event}});
    } catch (const std::bad_alloc&) {
      std::scoped_lock lock(lock_);
      lost_bytes_ += bytes;  // see `deallocate_slowly`
      throw;
    }
  }
  poll();
}

// No more than the quarantine may hold: an allocation would wait for the rest.
std::size_t Pool::take_large(Lane& lane, std::uint32_t first_class, std::vector<Block*>& blocks) {
  drain(lane);
  std::size_t bytes = 0, count = 0;
  const auto each = [&](auto visit) {
    for (std::size_t index = first_class; index < lane.bins.size(); ++index) {
      if (!lane.bins[index].empty()) visit(lane.bins[index]);
    }
  };
  each([&](const std::vector<Block*>& bin) {
    count += bin.size();
    bytes += bin.size() * process_.pages.find(bin.front()->start)->block_bytes;
  });
  if (bytes > options_.quarantine_limit_bytes - std::min(options_.quarantine_limit_bytes, quarantine_.bytes())) return 0;
  blocks.reserve(count);
  each([&](std::vector<Block*>& bin) {
    blocks.insert(blocks.end(), bin.begin(), bin.end());
    bin.clear();
  });
  lane.free_bytes -= bytes;
  return bytes;
}

// What the bridge's thread does about the budget, at its tick and when a pool of a device has grown beyond it. Without it a program that stops allocating would keep its peak for ever.
BackgroundTask::Delay Pool::keep_budget() {
  using std::chrono::milliseconds;
  constexpr milliseconds kLongest{2500}, kPause{5};
  const milliseconds tick =
      std::min(kLongest, std::chrono::duration_cast<milliseconds>(std::chrono::nanoseconds(period_ns())) / 2);
  if (!budgeted_) return BackgroundTask::kNever;
  std::size_t excess = 0;
  {
    std::scoped_lock lock(lock_);
    look_at_clock(0);
    if (reserved_bytes_ <= kWatched) return BackgroundTask::kNever;
    excess = above_budget(0, 0);
    const std::pair<std::size_t, std::size_t> now{reserved_bytes_, used_bytes_};
    if (excess == 0 || (ordered() && now == pinned_at_)) return tick;
    pinned_at_ = {};
  }
  if (!ordered()) {
    give_back(excess);
    return tick;
  }
  if (!nothing_runs()) return tick;
  settle_all();
  if (give_back(std::min(excess, kGivenAtOnce)) != 0) return kPause;
  std::scoped_lock lock(lock_);
  // Nothing can go until this has changed, unless work has begun meanwhile: the lanes are left alone.
  if (quarantine_.empty()) pinned_at_ = {reserved_bytes_, used_bytes_};
  return tick;
}

// Whether no work is known of that a device has not finished.
bool Pool::nothing_runs() {
  poll();
  Pins pins(*this);
  {
    std::scoped_lock lock(lock_);
    if (!quarantine_.empty()) return false;
    lanes_.for_each_stream([&](Lane& lane) {
      // An event on the legacy stream makes blocking streams wait for each other, so it is left out unless blocks are on it.
      const bool used = !lane.stream.legacy() || lane.named_count != 0 || lane.free_bytes != 0 || lane.front.free_bytes != 0;
      if (lane.held() && used) pins.add(lane);
    });
  }
  for (const std::uint16_t index : pins) {
    EventRef event;
    if (events_->record(lanes_.at(index).stream, event) != Recorded::done || !events_->finished(event)) return false;
  }
  return true;
}

// Called where growth has served its request: the thread looks after what is reserved from here on.
void Pool::watch(std::size_t added_bytes) noexcept {
  if (!budgeted_) return;
  bool begins = false, beyond = false;
  {
    std::scoped_lock lock(lock_);
    begins = reserved_bytes_ > kWatched && reserved_bytes_ - std::min(reserved_bytes_, added_bytes + kGranule) <= kWatched;
    beyond = reserved_bytes_ > budget_for(0);
    begins = begins || (beyond && ordered() && reserved_bytes_ > kWatched);
  }
  if (beyond) process_.beyond_budget.fetch_add(1, std::memory_order_relaxed);
  if (begins) process_.background.wake();
}

// Of a block that was just handed out and that nobody else knows.
void Pool::fill_with_zeros(char* ptr, std::size_t bytes) noexcept {
  if (parts_ && bytes >= kLeastDropped) {
    const auto start = reinterpret_cast<std::uintptr_t>(ptr);
    const std::uintptr_t low = (start + kPageBytes - 1) / kPageBytes * kPageBytes,
                         high = (start + bytes) / kPageBytes * kPageBytes;
    if (upstream_->clear(reinterpret_cast<char*>(low), high - low)) {
      std::memset(ptr, 0, low - start);
      std::memset(reinterpret_cast<char*>(high), 0, start + bytes - high);
      return;
    }
  }
  if (ordered() && bytes >= kLeastShared && process_.running()) {
    const WithoutGil without(process_);
    write_zeros(ptr, bytes, std::min({process_.limits.processors(), kMostThreads, bytes / kLeastShare}));
  } else {
    std::memset(ptr, 0, bytes);
  }
}

}  // namespace rmm_bridge
