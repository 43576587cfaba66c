// TrackedPool, the part that is not hot: what the front has not got, and ends of all kinds.
#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

void* TrackedPool::allocate(const Request& request, Refusal& refusal, bool* zeroed, bool* held) noexcept {
  return allocate_in_place(request, refusal, zeroed, held);
}

Freed TrackedPool::deallocate(Process& process, void* ptr, std::uint64_t stated_bytes, const CUstream* stream,
                              const Provenance& who) noexcept {
  return ptr == nullptr ? Freed::done : deallocate_in_place(process, find(process, ptr), ptr, stated_bytes, stream, who);
}

void* TrackedPool::allocate_slowly(Request request, KnownStream stream, Refusal& refusal, bool* zeroed, bool* held) noexcept {
  if (request.bytes == 0) return nullptr;
  if (request.bytes > kLargestRequest || !acts()) {
    refusal = Refusal::out_of_memory;
  } else if (refusal == Refusal::none && !request.host_ordered && stream.host()) {
    refusal = resolve(request.stream, stream);
  }
  Grant grant;
  if (refusal == Refusal::none) {
    for (int attempt = 0;; ++attempt) {
      refusal = take(request, stream, grant);
      if (refusal != Refusal::out_of_memory && refusal != Refusal::over_budget) break;
      if (!relieved(request.bytes, attempt, request.may_collect)) break;
    }
  }
  if (refusal != Refusal::none) {
    process().failures.fetch_add(1, std::memory_order_relaxed);
    process().note({Action::failure, key_for(request.who), entry_for(request, nullptr)});
    return nullptr;
  }
  populate(grant.fresh);
  if (zeroed != nullptr && grant.zeroed) *zeroed = true;
  if (held != nullptr && !grant.held) *held = false;
  return grant.ptr;
}

// One try: a block with its record, or a refusal and nothing changed.
Refusal TrackedPool::take(const Request& request, const KnownStream& stream, Grant& grant) noexcept {
  const auto bytes = static_cast<std::int64_t>(request.bytes);
  const bool budgeted = request.who.tag != 0 && process().budgets.any();
  if (budgeted && !process().budgets.charge(request.who.tag, bytes)) return Refusal::over_budget;
  // Bins of streams hold GPU blocks: a CPU block for a stream is one that is shown to it from the start.
  const bool shown = request.side == Side::cpu && !stream.host();
  static const KnownStream kHost;  // not a temporary: copying one waits for the stores that have just made it
  Refusal refusal = Pool::allocate(request.bytes, request.alignment, request.side, shown ? kHost : stream, grant);
  if (refusal == Refusal::none) [[likely]] {
    try {
      if (shown) [[unlikely]]
        record_stream(grant.block, grant.ptr, stream);
      if (track_ != Track::off) {
        Entry entry = entry_for(request, grant.ptr);
        const HolderKey key = key_for(request.who);
        const Ledger::EntryId id = process().ledger.open(entry, key);
        grant.block->entry.store(id, std::memory_order_release);
        if (process().noting()) [[unlikely]] {
          process().note({Action::allocate, key, entry}, id);
        }
      }
      return Refusal::none;
    } catch (const std::bad_alloc&) {
      give_back(grant.block, request.bytes, shown, stream);
      grant = Grant{};  // the next try must find no mark of this one, such as that it was zeroed
      refusal = Refusal::out_of_memory;
    }
  }
  if (budgeted) process().budgets.charge(request.who.tag, -bytes);
  return refusal;
}

// Of a block that nobody has seen yet.
void TrackedPool::give_back(Block* block, std::size_t bytes, bool shown, StreamRef stream) noexcept {
  block->flags.store(0);
  Pool::deallocate({process().pages.find(block->start), block, bytes}, shown, shown || stream.host() ? nullptr : &stream);
}

// True if another try is worth it: Python made room.
bool TrackedPool::relieved(std::size_t bytes, int attempt, bool may_collect) noexcept {
  return process().relieve != nullptr && acts() && process().relieve(bytes, attempt, may_collect);
}

// The bridge's own thread looks after the pool.
BackgroundTask::Delay TrackedPool::run() noexcept {
  if (over()) return kOver;
  if (!acts()) return kNever;
  if (!retired()) return run_tasks();
  try {
    if (live_count() != 0) {
      trim();  // nobody will ask for what is free, and the last block may stay for long
      return std::min(run_tasks(), numbers().quarantined_bytes == 0 ? kNever : Delay{1000});
    }
    if (close(false)) {
      if (process().on_closed != nullptr) process().on_closed();
      return kOver;
    }
  } catch (const std::bad_alloc&) {
  }
  // Device work on freed blocks goes on, or they wait for a stream that is never seen again.
  retry_ = std::min(2 * retry_, Delay{10'000});
  return retry_;
}

Freed TrackedPool::refuse_free(Process& process, Freed why, void* ptr, std::uint64_t stated_bytes,
                               const Provenance& who) noexcept {
  process.foreign_frees.fetch_add(1, std::memory_order_relaxed);
  HistoryEvent event{Action::foreign_free, HolderKey{who.site, who.tag, -1, who.framework, 0}, Entry{}};
  event.entry.ptr = reinterpret_cast<std::uintptr_t>(ptr);
  event.entry.time_ns = coarse_time_ns();
  event.entry.thread = native_thread_id();
  event.stated_bytes = stated_bytes == kUnstated ? 0 : stated_bytes;
  process.note(event);
  return why;
}

// Of a free that somebody has asked to know of, or that states another size than was recorded.
void TrackedPool::tell_end(const Entry& entry, Ledger::EntryId id, std::uint64_t stated_bytes) noexcept {
  Process& all = process();
  const HolderKey key = all.ledger.key_of(entry.holder);
  all.budgets.charge(key.tag, -static_cast<std::int64_t>(entry.bytes));
  if (debug()) remember_end(entry);
  if (stated_bytes != kUnstated && stated_bytes != entry.bytes) {
    all.size_mismatches.fetch_add(1, std::memory_order_relaxed);
    all.note({Action::size_mismatch, key, entry, stated_bytes});
  }
  if (all.noting()) {
    all.note({Action::deallocate, key, entry, stated_bytes == kUnstated ? 0 : stated_bytes}, id);
  }
}

// After a free in a retired pool. Giving memory back waits for the device, which a framework's free must not.
void TrackedPool::close_soon(std::size_t freed_bytes) noexcept {
  Process& all = process();
  if (live_count() != 0) {
    if (freed_bytes > kLargestSmall) all.background.wake();
  } else if (!all.background.wake() && all.on_closed != nullptr) {
    all.on_closed();
  }
}

// Debug mode: whose a freed block was, for as long as it may still be found damaged.
void TrackedPool::remember_end(const Entry& entry) noexcept {
  try {
    std::scoped_lock lock(ended_lock_);
    endings_[entry.ptr] = entry;
  } catch (const std::bad_alloc&) {  // then its damage is reported without a name
  }
}

void TrackedPool::forget_end(const char* ptr) noexcept {
  std::scoped_lock lock(ended_lock_);
  endings_.erase(reinterpret_cast<std::uintptr_t>(ptr));
}

void TrackedPool::damaged(PendingWarning::Kind kind, const char* ptr, std::size_t bytes, std::ptrdiff_t offset) noexcept {
  PendingWarning warning{kind, bytes, offset, HolderKey{}, Entry{}};
  warning.who.device = device_;
  warning.entry.ptr = reinterpret_cast<std::uintptr_t>(ptr);
  {
    std::scoped_lock lock(ended_lock_);
    if (auto found = endings_.find(warning.entry.ptr); found != endings_.end()) warning.entry = found->second;
  }
  if (warning.entry.serial != 0) warning.who = process().ledger.key_of(warning.entry.holder);
  process().note({Action::damage, warning.who, warning.entry});
  process().warn(warning);
}

}  // namespace rmm_bridge
