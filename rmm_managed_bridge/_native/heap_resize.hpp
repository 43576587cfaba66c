// Heap, the part about blocks that grow or shrink. Included by heap.hpp.
#pragma once

#include <cstring>

#include "heap.hpp"

namespace rmm_bridge {

inline void* Heap::reallocate(Process& process, void* ptr, std::size_t bytes) noexcept {
  Found found = find(process, ptr);
  if (found.block == nullptr || found.start != ptr || bytes == 0 || bytes > kLargestRequest) return nullptr;
  auto* heap = static_cast<Heap*>(found.span->pool);
  const auto id = found.block->entry.load(std::memory_order_acquire);
  Entry entry;
  const std::size_t old_bytes = process.ledger.read(id, entry) ? entry.bytes : found.span->block_bytes;
  const SizeClass wanted = size_class(bytes, kCpuUnit);
  const HolderKey key = id == 0 ? HolderKey{} : process.ledger.key_of(entry.holder);
  const auto growth = static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(old_bytes);
  const bool in_place = wanted.bytes == found.span->block_bytes && !heap->alone();
  Grant grant;
  for (int attempt = 0;; ++attempt) {
    const bool charged = process.budgets.charge(key.tag, growth);
    if (charged && (in_place || heap->Pool::allocate(bytes, kCpuUnit, Side::cpu, StreamRef{}, grant) == Refusal::none)) {
      break;
    }
    if (charged) process.budgets.charge(key.tag, -growth);
    if (heap->relieved(bytes, attempt, false)) continue;
    process.failures.fetch_add(1, std::memory_order_relaxed);
    entry.bytes = bytes;
    process.history.add({Action::failure, key, entry});
    return nullptr;
  }
  if (in_place) {
    heap->account_resize(id, ptr, bytes, growth);
    return ptr;
  }
  const bool exposed = (found.block->flags.load() & Block::kExposed) != 0;
  bool ordered = true;
  if (exposed) {
    try {
      ordered = heap->synchronize(found.block, static_cast<char*>(ptr)) == Refusal::none;
    } catch (const std::bad_alloc&) {
      ordered = false;
    }
  }
  if (!ordered) {
    process.budgets.charge(key.tag, -growth);
    grant.block->flags.store(0);
    heap->Pool::deallocate({process.pages.find(grant.ptr), grant.block, bytes}, false, nullptr);
    return nullptr;
  }
  std::memcpy(grant.ptr, ptr, std::min(old_bytes, bytes));
  found.block->entry.store(0);
  grant.block->entry.store(id, std::memory_order_release);
  heap->account_resize(id, grant.ptr, bytes, 0);
  // The hints were for these pages; those that the block moves to have none.
  if ((found.block->flags.exchange(0) & Block::kHinted) != 0) heap->end_hints(ptr);
  heap->Pool::deallocate({found.span, found.block, old_bytes}, exposed, nullptr);
  return grant.ptr;
}

// `growth`: of a block that stays where it is; one that moves is counted by the pool.
inline void Heap::account_resize(Ledger::EntryId id, void* ptr, std::size_t bytes, std::ptrdiff_t growth) noexcept {
  if (growth != 0) resized(growth);
  if (id == 0) return;
  process().ledger.resize(id, reinterpret_cast<std::uintptr_t>(ptr), bytes);
  Entry entry;
  if (process().record_all_events.load(std::memory_order_relaxed) && process().ledger.read(id, entry)) {
    process().history.add({Action::resize, process().ledger.key_of(entry.holder), entry});
  }
}

}  // namespace rmm_bridge
