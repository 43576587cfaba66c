// Heap, the part about blocks that grow or shrink.
#include <cstring>

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

void* Heap::reallocate(Process& process, void* ptr, std::size_t bytes) noexcept {
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
  const auto nothing = [] {};
  if (in_place) {
    if (heap->account_resize(id, ptr, ptr, bytes, nothing) && growth != 0) heap->resized(growth);
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
  std::uint8_t flags = 0;
  if (ordered) {
    std::memcpy(grant.ptr, ptr, std::min(old_bytes, bytes));
    const auto move = [&] {
      flags = found.block->flags.exchange(0);
      found.block->entry.store(0, std::memory_order_release);
      grant.block->entry.store(id, std::memory_order_release);
    };
    if (id == 0) {
      move();
    } else {
      heap->account_resize(id, ptr, grant.ptr, bytes, move);
    }
  }
  // Not ordered, or freed meanwhile by another thread, wrongly: then the old block is its.
  if ((flags & Block::kLive) == 0) {
    process.budgets.charge(key.tag, -growth);
    grant.block->flags.store(0);
    heap->Pool::deallocate({process.pages.find(grant.ptr), grant.block, bytes}, false, nullptr);
    return nullptr;
  }
  // The hints were for these pages; those that the block moves to have none.
  if ((flags & Block::kHinted) != 0) heap->end_hints(ptr);
  heap->Pool::deallocate({found.span, found.block, old_bytes}, exposed, nullptr);
  return grant.ptr;
}

// False if the block has ended.
template <typename Moved>
bool Heap::account_resize(Ledger::EntryId id, void* from, void* to, std::size_t bytes, Moved moved) noexcept {
  if (id == 0) return true;
  const auto number = [](void* ptr) { return reinterpret_cast<std::uintptr_t>(ptr); };
  if (!process().ledger.resize(id, number(from), number(to), bytes, moved)) return false;
  Entry entry;
  if (process().recording() && process().ledger.read(id, entry)) {
    process().history.add({Action::resize, process().ledger.key_of(entry.holder), entry});
  }
  return true;
}

}  // namespace rmm_bridge
