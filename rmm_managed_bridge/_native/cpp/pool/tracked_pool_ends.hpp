// Heap, the part about ends: frees that are refused or told of, and debug mode. Included by tracked_pool.hpp.
#pragma once

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

inline Freed Heap::refuse_free(Process& process, Freed why, void* ptr, std::uint64_t stated_bytes,
                               const Provenance& who) noexcept {
  process.foreign_frees.fetch_add(1, std::memory_order_relaxed);
  HistoryEvent event{Action::foreign_free, HolderKey{who.site, who.tag, -1, who.framework, 0}, Entry{}};
  event.entry.ptr = reinterpret_cast<std::uintptr_t>(ptr);
  event.entry.time_ns = coarse_time_ns();
  event.entry.thread = native_thread_id();
  event.stated_bytes = stated_bytes == kUnstated ? 0 : stated_bytes;
  process.history.add(event);
  return why;
}

// Of a free that somebody has asked to know of, or that states another size than was recorded.
[[gnu::noinline]] inline void Heap::tell_end(const Entry& entry, std::uint64_t stated_bytes) noexcept {
  Process& all = process();
  const HolderKey key = all.ledger.key_of(entry.holder);
  all.budgets.charge(key.tag, -static_cast<std::int64_t>(entry.bytes));
  if (alone()) remember_end(entry);
  if (stated_bytes != kUnstated && stated_bytes != entry.bytes) {
    all.size_mismatches.fetch_add(1, std::memory_order_relaxed);
    all.history.add({Action::size_mismatch, key, entry, stated_bytes});
  }
  if (all.recording()) {
    all.history.add({Action::deallocate, key, entry, stated_bytes == kUnstated ? 0 : stated_bytes});
  }
}

// After a free in a retired heap. Giving memory back waits for the device, which a framework's free must not.
[[gnu::noinline]] inline void Heap::close_soon(std::size_t freed_bytes) noexcept {
  Process& all = process();
  if (live_count() != 0) {
    if (freed_bytes > kLargestSmall) all.keeper.wake();
  } else if (!all.keeper.wake() && all.on_closed != nullptr) {
    all.on_closed();
  }
}

// Debug mode: whose a freed block was, for as long as it may still be found damaged.
inline void Heap::remember_end(const Entry& entry) noexcept {
  try {
    std::scoped_lock lock(ended_lock_);
    endings_[entry.ptr] = entry;
  } catch (const std::bad_alloc&) {  // then its damage is reported without a name
  }
}

inline void Heap::forget_end(const char* ptr) noexcept {
  std::scoped_lock lock(ended_lock_);
  endings_.erase(reinterpret_cast<std::uintptr_t>(ptr));
}

inline void Heap::damaged(Notice::Kind kind, const char* ptr, std::size_t bytes, std::ptrdiff_t offset) noexcept {
  Notice notice{kind, bytes, offset, HolderKey{}, Entry{}};
  notice.who.device = device_;
  notice.entry.ptr = reinterpret_cast<std::uintptr_t>(ptr);
  {
    std::scoped_lock lock(ended_lock_);
    if (auto found = endings_.find(notice.entry.ptr); found != endings_.end()) notice.entry = found->second;
  }
  if (notice.entry.serial != 0) notice.who = process().ledger.key_of(notice.entry.holder);
  process().history.add({Action::damage, notice.who, notice.entry});
  process().notice(notice);
}

}  // namespace rmm_bridge
