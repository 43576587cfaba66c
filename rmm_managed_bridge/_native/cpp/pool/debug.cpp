// Pool, the debug mode (pool="debug"): each block is a piece of upstream of its own between guard bytes, so that sanitizers
// see where it begins and ends. Nothing is used again: a freed block is checked, filled, and given back a little later, when
// it is looked at once more.
#include <cstring>

#include "pool/pool.hpp"

// There where the program runs under AddressSanitizer: the guards and freed blocks are out of bounds for everybody.
extern "C" __attribute__((weak)) void __asan_poison_memory_region(const volatile void* address, std::size_t bytes);
extern "C" __attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* address, std::size_t bytes);

namespace rmm_bridge {

inline constexpr std::size_t kFrontGuard = kGpuUnit;  // keeps the block aligned
inline constexpr std::size_t kRearGuard = 64;
inline constexpr unsigned char kGuardFill = 0xFD;
inline constexpr unsigned char kNewFill = 0xCD;
inline constexpr unsigned char kFreedFill = 0xDD;
inline constexpr std::int64_t kTickNs = 50'000'000;

void out_of_bounds(const char* ptr, std::size_t bytes, bool out) noexcept {
  auto* mark = out ? __asan_poison_memory_region : __asan_unpoison_memory_region;
  if (mark != nullptr) mark(ptr, bytes);
}

// The first byte that is not `fill`, or null.
const char* first_other(const char* from, const char* to, unsigned char fill) noexcept {
  const char* found = std::find_if(from, to, [&](char each) { return static_cast<unsigned char>(each) != fill; });
  return found == to ? nullptr : found;
}

bool Pool::grow_debug(const Want& want, Grant& out, bool& contended) {
  const std::size_t front = std::max(kFrontGuard, want.alignment);
  auto chunk = std::make_unique<Chunk>();
  chunk->side = want.side;
  chunk->bytes = want.size.bytes;
  chunk->upstream_bytes = front + want.size.bytes + kRearGuard + want.alignment;  // the last: to align in
  Span* span = nullptr;
  {
    std::scoped_lock lock(lock_);
    if (unused_debug_.empty()) {
      auto fresh = std::make_unique<Span>();
      auto table = std::make_unique<Block[]>(1);
      debug_tables_.reserve(debug_tables_.size() + 1);
      settled_.reserve(settled_.capacity() + 1);  // giving back needs no memory
      unused_debug_.reserve(unused_debug_.capacity() + 1);
      fresh->blocks.store(table.get(), std::memory_order_release);
      fresh->block_capacity = 1;
      debug_tables_.push_back(std::move(table));
      span = fresh.release();  // never freed: a look-up may be reading it
    } else {
      span = unused_debug_.back();
      unused_debug_.pop_back();
    }
    if (!reserve(chunk->upstream_bytes, contended)) {
      unused_debug_.push_back(span);
      return false;
    }
  }
  {
    WithoutGil without(process_);
    chunk->upstream_base = static_cast<char*>(upstream_->allocate(chunk->upstream_bytes));
  }
  try {
    if (chunk->upstream_base == nullptr) throw std::bad_alloc();
    const auto lowest = reinterpret_cast<std::uintptr_t>(chunk->upstream_base) + front;
    chunk->base = reinterpret_cast<char*>((lowest + want.alignment - 1) & ~(std::uintptr_t{want.alignment} - 1));
    std::memset(chunk->upstream_base, kGuardFill, chunk->upstream_bytes);
    std::memset(chunk->base, kNewFill, chunk->bytes);
    span->pool = this;
    span->side = want.side;
    span->zeroed = false;
    span->base = chunk->base;
    span->bytes = chunk->bytes;
    span->set_block_bytes(chunk->bytes);
    span->class_index = want.size.index;
    span->block_count = span->carved_count = 1;
    process_.pages.set_alone(chunk->upstream_base, chunk->upstream_bytes, span);
  } catch (const std::bad_alloc&) {
    if (chunk->upstream_base != nullptr) upstream_->deallocate(chunk->upstream_base, chunk->upstream_bytes);
    std::scoped_lock lock(lock_);
    end_reserving(chunk->upstream_bytes, false);
    unused_debug_.push_back(span);
    return false;
  }
  out_of_bounds(chunk->upstream_base, static_cast<std::size_t>(chunk->base - chunk->upstream_base), true);
  out_of_bounds(chunk->base + chunk->bytes, kRearGuard, true);
  span->chunk = chunk.release();
  std::scoped_lock lock(lock_);
  end_reserving(span->chunk->upstream_bytes, true);
  span->idle_count = 0;
  span->state.store(Span::State::blocks, std::memory_order_release);
  Block* block = &span->blocks.load(std::memory_order_relaxed)[0];
  block->start = span->base;
  hand_out(block, want, false, out);
  return true;
}

// Looks at every block that nothing touches any more: the first time it is checked and filled, the second time, a tick of
// the bridge's own thread later, it is looked at for changes since, and goes back to upstream. With `all`, both at once.
// Returns what went.
std::size_t Pool::release_debug(bool all) {
  InHand in_hand(*this);
  std::vector<Span*> looking;
  const std::int64_t now_ns = steady_time_ns();
  with_lock([&] {
    const bool due = all || now_ns - looked_ns_ >= kTickNs;
    if (due) looked_ns_ = now_ns;
    std::erase_if(settled_, [&](Span* span) {
      if (span->idle_count != 0 && !due) return false;
      looking.push_back(span);
      return true;
    });
    if (!looking.empty()) in_hand.begin();
  });
  if (looking.empty()) return 0;
  std::vector<Span*> gone;
  WithoutGil without(process_);
  std::size_t bytes = 0;
  for (Span* span : looking) {
    const Chunk* chunk = span->chunk;
    out_of_bounds(chunk->upstream_base, chunk->upstream_bytes, false);
    check_debug(span);
    if (span->idle_count++ == 0) {
      std::memset(span->base, kFreedFill, span->bytes);
      out_of_bounds(chunk->upstream_base, chunk->upstream_bytes, true);
      continue;
    }
    forget_end(span->base);
    // Before upstream has it: it may give the same addresses to another thread at once.
    process_.pages.clear_alone(chunk->upstream_base);
    span->state.store(Span::State::unused, std::memory_order_release);
    upstream_->deallocate(chunk->upstream_base, chunk->upstream_bytes);
    bytes += chunk->upstream_bytes;
    delete chunk;
    span->chunk = nullptr;
    gone.push_back(span);
  }
  std::scoped_lock lock(lock_);
  reserved_bytes_ -= bytes;
  unused_debug_.insert(unused_debug_.end(), gone.begin(), gone.end());
  for (Span* span : looking) {
    if (span->chunk != nullptr) settled_.push_back(span);
  }
  return bytes;
}

void Pool::check_debug(const Span* span) noexcept {
  const char* end = span->base + span->bytes;
  const auto look = [&](PendingWarning::Kind kind, const char* from, const char* to, unsigned char fill) {
    const char* found = first_other(from, to, fill);
    if (found != nullptr) damaged(kind, span->base, span->bytes, found - span->base);
  };
  if (span->idle_count == 0) {
    look(PendingWarning::Kind::written_before, span->chunk->upstream_base, span->base, kGuardFill);
    look(PendingWarning::Kind::written_behind, end, end + kRearGuard, kGuardFill);
  } else {
    look(PendingWarning::Kind::written_after_free, span->base, end, kFreedFill);
  }
}

}  // namespace rmm_bridge
