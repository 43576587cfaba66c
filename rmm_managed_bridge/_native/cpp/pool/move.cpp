// Pool, the part about large blocks of host memory that change their size without being copied: where they lie, or with their pages.
// No device touches this memory, so that nothing is waited for.
#include "pool/pool.hpp"

namespace rmm_bridge {

bool Pool::resize_in_place(Span* span, Block* block, const SizeClass& size) noexcept {
  if (!parts_ || ordered() || !span->large() || size.bytes <= kLargestSmall) return false;
  Advice advice;
  {
    std::scoped_lock lock(lock_);
    // Whoever frees it wrongly meanwhile comes here after that: its flags go first.
    if ((block->flags.load() & Block::kLive) == 0) return false;
    const std::size_t before = span->block_bytes;
    if (!slabs_.resize(span, size)) return false;
    used_bytes_ += size.bytes - before;
    if (advises(span->side)) {
      advice = process_.hugepages.settle(process_.pages, span->base, span->bytes, size.bytes >= kLeastAdvised);
    }
  }
  advise(advice);
  return true;
}

bool Pool::begin_move(Span* from, const SizeClass& size, std::size_t more_asked, Move& move) noexcept {
  if (!parts_ || ordered() || !from->large() || size.bytes <= from->block_bytes) return false;
  const std::size_t bytes = round_to_granule(size.bytes), more = bytes - from->bytes;
  try {
    if (budgeted_) {
      const std::size_t excess = with_lock([&] {
        look_at_clock(more_asked);
        return above_budget(more, more_asked);
      });
      if (excess != 0) give_back(excess);
    }
    {
      std::scoped_lock lock(lock_);
      bool contended = false;
      if (!reserve(more, contended)) return false;
    }
    if (char* place = upstream_->reserve(bytes); place != nullptr) {
      try {
        process_.pages.reserve(place, bytes);
        move.from = from;
        move.to = with_lock([&] {
          Span* to = slabs_.span_for(from->side, place, size);
          end_reserving(more, true);
          return to;
        });
        return true;
      } catch (const std::bad_alloc&) {
        upstream_->release(place, bytes);
      }
    }
    std::scoped_lock lock(lock_);
    end_reserving(more, false);
  } catch (const std::bad_alloc&) {
  }
  return false;
}

// Until it is known where the pages are, the page map leads to neither place: the one that they are not at may be somebody else's at once.
bool Pool::end_move(const Move& move) noexcept {
  const auto& [from, to] = move;
  with_lock([&] { slabs_.leave(from); });
  const bool moved = upstream_->move(from->base, from->bytes, to->base, to->bytes);
  Advice advice;
  {
    std::scoped_lock lock(lock_);
    if (!moved) {
      reserved_bytes_ -= to->bytes - from->bytes;
      slabs_.enter(from);
      slabs_.forget(to);
      return false;
    }
    slabs_.enter(to);
    used_bytes_ += to->block_bytes - from->block_bytes;
    if (advises(to->side)) {
      process_.hugepages.forget(process_.pages, from->base, from->bytes);
      process_.hugepages.doubt(process_.pages, to->base, to->bytes);
      advice = process_.hugepages.settle(process_.pages, to->base, to->bytes, to->block_bytes >= kLeastAdvised);
    }
    slabs_.forget(from);
  }
  advise(advice);
  watch(to->bytes - from->bytes);
  return true;
}

void Pool::cancel_move(const Move& move) noexcept {
  upstream_->release(move.to->base, move.to->bytes);
  std::scoped_lock lock(lock_);
  reserved_bytes_ -= move.to->bytes - move.from->bytes;
  slabs_.forget(move.to);
}

}  // namespace rmm_bridge
