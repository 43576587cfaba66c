// Pool, the part about upstream: giving memory back, and ending.
#include <utility>

#include "pool/pool.hpp"

namespace rmm_bridge {

// Of all that was freed and waits, or is lost.
std::size_t Pool::quarantined_bytes() noexcept { return quarantine_.bytes() + lanes_.at(kDeferredLane).free_bytes + lost_bytes_; }

PoolNumbers Pool::numbers() {
  std::scoped_lock lock(lock_);
  drain_all();
  const std::size_t elsewhere = used_bytes_ + quarantined_bytes() + slabs_.free_bytes();
  return {.reserved_bytes = reserved_bytes_,
          .used_bytes = used_bytes_,
          .asked_bytes = asked_bytes_,
          .quarantined_bytes = quarantined_bytes(),
          .largest_free_bytes = slabs_.largest_free_bytes(),
          .lane_count = lanes_.size(),
          .slab_free_bytes = options_.debug ? 0 : reserved_bytes_ - std::min(reserved_bytes_, elsewhere),
          .pinned_bytes = slabs_.pinned_bytes()};
}

std::size_t Pool::cached_bytes() noexcept {
  std::scoped_lock lock(lock_);
  drain_all();
  const std::size_t in_use = used_bytes_ + quarantined_bytes();
  return reserved_bytes_ - std::min(reserved_bytes_, in_use);
}

std::size_t Pool::trim(std::size_t keep_bytes) {
  if (!acts()) return 0;
  std::size_t bytes = options_.debug ? release_debug(true) : 0;
  if (keep_bytes != 0) {
    // First what is whole as it is, so that streams keep what they would take again at once.
    poll();
    bytes += give_back_above(keep_bytes);
    if (cached_bytes() <= keep_bytes) return bytes;
  }
  settle_all();
  return bytes + give_back_above(keep_bytes) + (options_.debug ? release_debug(true) : 0);
}

// All that is free leaves its lane, behind an event, and what has finished can go back or become anything.
void Pool::settle_all() {
  flush_deferred();
  std::vector<std::uint16_t> open;
  with_lock([&] {
    lanes_.for_each_stream([&](Lane& lane) {
      drain(lane);
      if (lane.free_bytes != 0) open.push_back(lane.index);
    });
  });
  for (std::uint16_t index : open) close_lane(index, nullptr);
  poll();
}

std::size_t Pool::give_back_above(std::size_t keep_bytes) {
  if (keep_bytes == 0) return give_back(PoolOptions::kNoLimit);
  const std::size_t cached = cached_bytes();
  return give_back(cached - std::min(cached, keep_bytes));
}

// Gives about so many free bytes back to upstream, and returns how many went: whole pieces, or parts of free spans.
std::size_t Pool::give_back(std::size_t wanted_bytes) {
  InHand in_hand(*this);
  std::vector<Span*> spans;
  with_lock([&] {
    free_idle_slabs();
    try {
      slabs_.take_free(wanted_bytes, parts_, spans);
    } catch (const std::bad_alloc&) {  // the rest is for the next time
    }
    if (!spans.empty()) in_hand.begin();
    for (const Span* span : spans) {
      if (options_.populate && span->side == Side::gpu) FreshPages::forget(process_.pages, span->base, span->bytes);
      if (span->chunk == nullptr && advises(span->side)) process_.hugepages.forget(process_.pages, span->base, span->bytes);
    }
  });
  if (spans.empty()) return 0;
  WithoutGil without(process_);
  std::size_t bytes = 0;
  for (Span*& span : spans) {
    if (Chunk* chunk = span->chunk; chunk != nullptr) {
      if (advises(span->side)) {
        const Advice advice = process_.hugepages.end(process_.pages, chunk->base, chunk->bytes);
        if (advice.bytes != 0) process_.hugepages.give(advice);
      }
      bytes += chunk->upstream_bytes;
      upstream_->deallocate(chunk->upstream_base, chunk->upstream_bytes);
      delete chunk;
    } else if (upstream_->release(span->base, span->bytes)) {
      bytes += span->bytes;
    } else {
      keep_cleared(std::exchange(span, nullptr));
      continue;
    }
    process_.given_back.fetch_add(1, std::memory_order_relaxed);
  }
  // Only now: `close` lets upstream go once nothing is reserved.
  std::scoped_lock lock(lock_);
  for (Span* span : spans) {
    if (span != nullptr) slabs_.forget(span);
  }
  reserved_bytes_ -= bytes;
  return bytes;
}

// The kernel does not take a part back, since it has too many mappings: at least nothing of it is resident.
void Pool::keep_cleared(Span* span) noexcept {
  const bool cleared = upstream_->clear(span->base, span->bytes);
  std::scoped_lock lock(lock_);
  if (advises(span->side)) process_.hugepages.doubt(process_.pages, span->base, span->bytes);
  slabs_.keep(span, cleared);
}

void Pool::close_lane(std::uint16_t index, void** retire, bool last) {
  Lane& lane = lanes_.at(index);
  const void* const owner = retire == nullptr ? nullptr : std::exchange(*retire, nullptr);
  InHand in_hand(*this);
  Pins pins(*this);
  StreamRef stream;
  bool held = false;
  std::vector<Block*> blocks;
  std::vector<Quarantine::WaitFor> waits;
  std::size_t bytes = 0;
  {
    std::scoped_lock lock(lock_);
    if (!lane.in_use()) return;
    drain(lane);
    if (retire != nullptr && (lane.owner != owner || lane.pins != 0 || lane.named_count != 0 || !lane.points.empty())) return;
    pins.add(lane);
    stream = lane.stream;
    held = lane.held();
    for (const EventRef& each : lane.events) waits.push_back({index, each});
    waits.reserve(waits.size() + 1);
    // Before the event: what is freed from now on may have work behind it.
    bytes = lane.empty_into(blocks);
    if (bytes != 0) in_hand.begin();
  }
  try {
    EventRef event;
    const WithoutGil without(process_);
    const Recorded recorded = held ? events_->record(stream, event) : Recorded::done;
    if (held) waits.push_back({index, event});
    std::scoped_lock lock(lock_);
    if (retire != nullptr) close_front(lane);
    const bool unused = lane.pins == 1 && lane.named_count == 0 && lane.points.empty() && lane.free_bytes == 0;
    quarantine(std::move(blocks), bytes, waits);
    if (retire == nullptr) return;
    const bool certain = recorded == Recorded::done || (recorded == Recorded::capturing && last);
    if (certain && unused) {
      *retire = lanes_.let_go(lane, std::move(event));
    } else if (held) {
      lanes_.open_front(lane);
    }
  } catch (const std::bad_alloc&) {
    std::scoped_lock lock(lock_);
    lost_bytes_ += bytes;
    if (retire != nullptr && lane.held()) lanes_.open_front(lane);
    throw;
  }
}

bool Pool::close(bool wait) {
  if (live_count() != 0) return false;
  std::unique_ptr<Upstream> ended;
  for (;;) {
    trim();  // closes the lanes
    while (wait && wait_for_oldest()) {
    }
    trim();
    const bool others = hands_.load() != 0;  // asked before: who begins now finds nothing
    const bool empty = with_lock([&] {
      if (reserved_bytes_ != 0) return false;
      if (upstream_ != nullptr) slabs_.end();
      ended = std::move(upstream_);
      return true;
    });
    if (empty) break;
    if (!others) return false;
    // Not for ever: an upstream in Python that closes the pool in its own free would wait for itself.
    const auto until = std::chrono::steady_clock::now() + options_.patience;
    for (int turn = 0; hands_.load() != 0 && std::chrono::steady_clock::now() < until; ++turn) pause(turn);
    if (hands_.load() != 0 || live_count() != 0) return false;
  }
  WithoutGil without(process_);
  ended.reset();
  process_.remove_pool(this);
  over_.store(true, std::memory_order_release);  // last: what upstream stood on may go
  return true;
}

BackgroundTask::Delay Pool::run_tasks() noexcept {
  using std::chrono::milliseconds;
  constexpr milliseconds kSoon{50}, kLate{1000};
  if (!acts()) return BackgroundTask::kNever;
  BackgroundTask::Delay next = BackgroundTask::kNever;
  try {
    if (options_.debug) {
      poll();
      release_debug(false);
      std::scoped_lock lock(lock_);
      if (!settled_.empty() || !quarantine_.empty()) next = std::min(next, kSoon);
    }
    next = std::min(next, heed_limits());
    if (options_.release_threshold_bytes != PoolOptions::kNoLimit) {
      if (cached_bytes() > options_.release_threshold_bytes) trim(options_.release_threshold_bytes);
      const std::size_t cached = cached_bytes();
      delay_ = cached != seen_cached_bytes_ ? kSoon : std::clamp(2 * delay_, kSoon, kLate);
      seen_cached_bytes_ = cached;
      next = std::min(next, delay_);
    }
    next = std::min(next, keep_budget());
  } catch (const std::bad_alloc&) {
    next = kLate;
  }
  return next;
}

// Where the kernel is about to end somebody for want of memory, what is free goes back, whatever the pool was told to keep.
BackgroundTask::Delay Pool::heed_limits() {
  constexpr BackgroundTask::Delay kSoon{50}, kLate{1000};
  if (!process_.limits.limited()) return BackgroundTask::kNever;
  const MemoryLimits::Pressure pressure = process_.limits.look();
  if (pressure.excess_bytes != 0) {
    const std::size_t cached = cached_bytes();
    trim(cached - std::min<std::size_t>(cached, pressure.excess_bytes));
  }
  return pressure.near ? kSoon : kLate;
}

}  // namespace rmm_bridge
