// TrackedPool, the part about blocks that grow or shrink.
#include <algorithm>
#include <cstring>

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

namespace {

std::uintptr_t number(const void* ptr) noexcept { return reinterpret_cast<std::uintptr_t>(ptr); }

}  // namespace

void* TrackedPool::reallocate(Process& process, void* ptr, std::size_t bytes, Refusal& refusal) noexcept {
  refusal = Refusal::none;
  const Found found = find(process, ptr);
  if (!acts_on(process, found)) return nullptr;
  if (found.block == nullptr || found.start != ptr || (found.block->flags.load() & Block::kLive) == 0) {
    refuse_free(process, found.span == nullptr ? Freed::foreign : Freed::not_live, ptr, kUnstated, {});
    return nullptr;
  }
  if (bytes == 0 || bytes > kLargestRequest) return nullptr;
  auto* pool = static_cast<TrackedPool*>(found.span->pool);
  const auto id = found.block->entry.load(std::memory_order_acquire);
  Entry entry;
  const std::size_t old_bytes = process.ledger.read(id, entry) ? entry.bytes : found.span->block_bytes;
  const SizeClass wanted = size_class(bytes, kCpuUnit);
  const HolderKey key = id == 0 ? HolderKey{} : process.ledger.key_of(entry.holder);
  const auto growth = static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(old_bytes);
  const bool same = wanted.bytes == found.span->block_bytes && !pool->debug();
  bool in_place = false;
  Grant grant;
  for (int attempt = 0;; ++attempt) {
    const bool charged = process.budgets.charge(key.tag, growth);
    if (charged) {
      in_place = same || pool->resize_in_place(found.span, found.block, wanted);
      if (in_place) break;
      bool ended = false;
      if (void* moved = pool->move_pages(found, id, old_bytes, bytes, ended); moved != nullptr) return moved;
      if (ended) {
        process.budgets.charge(key.tag, -growth);
        return nullptr;
      }
      refusal = pool->Pool::allocate(bytes, kCpuUnit, Side::cpu, KnownStream{}, grant);
      if (refusal == Refusal::none) break;
      process.budgets.charge(key.tag, -growth);
    } else {
      refusal = Refusal::over_budget;
    }
    const bool may_help = refusal == Refusal::out_of_memory || refusal == Refusal::over_budget;
    if (may_help && pool->relieved(bytes, attempt, false)) continue;
    process.failures.fetch_add(1, std::memory_order_relaxed);
    entry.bytes = bytes;
    process.note({Action::failure, key, entry});
    return nullptr;
  }
  if (in_place) {
    if (pool->account_resize(id, ptr, ptr, bytes, [] {}) && growth != 0) pool->resized(growth);
    return ptr;
  }
  std::uint8_t flags = 0;
  if (pool->copy_when_finished(found, grant.ptr, std::min(old_bytes, bytes))) {
    const auto move = [&] {
      flags = found.block->flags.exchange(0);
      found.block->entry.store(0, std::memory_order_release);
      grant.block->entry.store(id, std::memory_order_release);
    };
    if (id == 0) {
      move();
    } else {
      pool->account_resize(id, ptr, grant.ptr, bytes, move);
    }
  }
  // Not copied, or freed meanwhile by another thread, wrongly: then the old block is its.
  if ((flags & Block::kLive) == 0) {
    process.budgets.charge(key.tag, -growth);
    pool->give_back(grant.block, bytes, false, {});
    return nullptr;
  }
  // Its flags are of the moment in which it ended: a stream that it was shown to during the copy is waited for. Hints do not move
  // along: they were for these pages.
  end(found, old_bytes, 0, flags, nullptr);
  return grant.ptr;
}

// To a place where there is room behind it: nothing is copied. Null if that cannot be done; `ended`: the block was freed meanwhile by
// another thread, wrongly. The account comes first: a block that is freed while its pages move must not be found where it was.
void* TrackedPool::move_pages(const Found& found, Ledger::EntryId id, std::size_t old_bytes, std::size_t bytes,
                              bool& ended) noexcept {
  Move move;
  const auto growth = static_cast<std::ptrdiff_t>(bytes) - static_cast<std::ptrdiff_t>(old_bytes);
  if (!begin_move(found.span, size_class(bytes, kCpuUnit), static_cast<std::size_t>(std::max<std::ptrdiff_t>(growth, 0)), move)) {
    return nullptr;
  }
  Block* const from = found.block;
  Block* const to = move.block();
  void* const place = to->start;
  std::uint8_t flags = 0;
  const auto hand_over = [&](Block* before, Block* after) {
    flags = before->flags.exchange(0);
    before->entry.store(0, std::memory_order_release);
    after->lane.store(before->lane.load(std::memory_order_relaxed), std::memory_order_relaxed);
    after->entry.store(id, std::memory_order_release);
    after->flags.store(flags, std::memory_order_release);
  };
  const bool moved =
      id == 0 || process().ledger.resize(id, number(found.start), number(place), bytes, [&] { hand_over(from, to); });
  if (moved && id == 0) hand_over(from, to);
  if ((flags & Block::kLive) == 0) {
    cancel_move(move);
    ended = true;
    return nullptr;
  }
  if (!end_move(move)) {
    if (id == 0) {
      hand_over(to, from);
    } else {
      process().ledger.resize(id, number(place), number(found.start), old_bytes, [&] { hand_over(to, from); });
    }
    return nullptr;
  }
  if (growth != 0) resized(growth);
  record_resize(id);
  return place;
}

// After the device work on the block. False, and nothing was copied, if that cannot be waited for.
bool TrackedPool::copy_when_finished(const Found& found, char* to, std::size_t bytes) noexcept {
  if ((found.block->flags.load() & Block::kShown) != 0) {
    if (in_host_function()) return false;
    try {
      if (synchronize(found.block, static_cast<char*>(found.start)) != Refusal::none) return false;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  std::memcpy(to, found.start, bytes);
  return true;
}

// False if the block has ended.
template <typename Moved>
bool TrackedPool::account_resize(Ledger::EntryId id, void* from, void* to, std::size_t bytes, Moved moved) noexcept {
  if (id == 0) return true;
  if (!process().ledger.resize(id, number(from), number(to), bytes, moved)) return false;
  record_resize(id);
  return true;
}

void TrackedPool::record_resize(Ledger::EntryId id) noexcept {
  Entry entry;
  if (id != 0 && process().noting() && process().ledger.read(id, entry)) {
    process().note({Action::resize, process().ledger.key_of(entry.holder), entry}, id);
  }
}

}  // namespace rmm_bridge
