#include "pool/fork_copying.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/threads.hpp"

namespace rmm_bridge {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLeastCopied = std::size_t{4} << 20;  // below, a thread costs more than it spares
constexpr std::size_t kStagingBytes = std::size_t{32} << 20, kPieceBytes = std::size_t{1} << 20;
// Between blocks of the CPU's that lie so near, only blocks that were freed can lie. Without such holes a child has fewer mappings,
// of which the kernel allows it a number.
constexpr std::uintptr_t kLargestHole = kGranule / 2;

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

}  // namespace

// Without any pool's lock: spans and their tables are never given back, so that what is read may be stale and is never garbage. With the
// gate closed what a live block lies in stays mapped.
void collect_for_fork(Process& process, std::vector<ForkUse>& uses, ForkReport& report) {
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
  for (const ForkUse& use : uses) report.block_bytes += use.high - use.low;
}

void ForkCopying::run(const std::vector<ForkItem>& items) noexcept {
  std::atomic<std::size_t> next{0}, copied{0};
  auto work = [&] {
    std::size_t mine = 0;
    for (std::size_t index; (index = next.fetch_add(1)) < items.size();) {
      const ForkItem& item = items[index];
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
  for (const ForkItem& item : items) total += item.bytes;
  on_threads(std::clamp<std::size_t>(total / kLeastCopied, 1, std::min(kMostThreads, process_.limits.processors())), work);
  report_.copied_bytes += copied.load();
}

void ForkCopying::leave_out(const ForkUse& use, ForkReport::Why why) {
  left_out_.insert(use.low);
  if (report_.left_out_count++ == 0) {
    report_.left_out = use.low;
    report_.why = why;
  }
  report_.left_out_bytes += use.high - use.low;
}

void ForkCopying::wait(const std::vector<ForkUse>& uses, Clock::time_point until) {
  std::vector<Pending> pending;
  for (const ForkUse& use : uses) {
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
CUstream ForkCopying::stream_of(TrackedPool& pool) {
  std::atomic<CUstream>& slot = process_.populating[static_cast<std::size_t>(pool.device())];
  CUstream stream = slot.load();
  if (stream != nullptr) return stream;
  if (process_.driver.stream_create(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return nullptr;
  CUstream first = nullptr;
  return slot.compare_exchange_strong(first, stream) ? stream : first;  // the other one is lost: two threads began at once
}

bool ForkCopying::finish(TrackedPool& pool, CUstream stream) {
  StreamRef ref;
  ref.handle = stream;
  ref.key = pool.events()->id_of(stream);
  EventRef event;
  return pool.events()->record(ref, event) == Recorded::done && pool.events()->synchronize(event);
}

// Pinned, so that the device writes there and nowhere else: where it can use all memory of the host, it might take pages of the mirror
// to itself. Stays for the next fork, as the mirror does.
char* ForkCopying::staging(CUcontext context) {
  ForkState& forks = process_.forks;
  if (forks.staging == nullptr &&
      process_.driver.host_alloc(&forks.staging, kStagingBytes, CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS) {
    forks.staging = nullptr;
  }
  forks.staging_context = context;
  return static_cast<char*>(forks.staging);
}

// All of one pool, and the addresses of those that could not be copied.
std::vector<std::uintptr_t> ForkCopying::fetch(TrackedPool& pool, const std::vector<ForkUse>& uses) {
  const Driver& driver = process_.driver;
  const DriverScope scope(&driver, pool.events()->context());
  const CUstream stream = stream_of(pool);
  char* const buffer = stream == nullptr ? nullptr : staging(pool.events()->context());
  bool works = buffer != nullptr;
  std::size_t filled = 0;
  std::vector<ForkItem> items;
  const auto flush = [&] {
    works = works && finish(pool, stream);
    if (works) run(items);
    items.clear();
    filled = 0;
  };
  std::vector<std::uintptr_t> failed;
  for (const ForkUse& use : uses) {
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
    for (const ForkUse& use : uses) failed.push_back(use.low);
  }
  return failed;
}

bool ForkCopying::copy_from_devices() {
  std::unordered_map<TrackedPool*, std::vector<ForkUse>> by_pool;
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

bool ForkCopying::copy(std::vector<ForkUse>& uses) {
  mirror_.begin();
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges;
  std::uintptr_t before = 0;  // where the one before ended, if that was the CPU's alone as well
  for (const ForkUse& use : uses) {
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
  std::vector<ForkItem> items;
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

}  // namespace rmm_bridge
