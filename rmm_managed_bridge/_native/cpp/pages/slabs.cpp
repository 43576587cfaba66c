#include "pages/slabs.hpp"

#include <algorithm>
#include <utility>

namespace rmm_bridge {

Block* SlabStore::next(Side side, const SizeClass& size, bool& zeroed) noexcept {
  std::vector<Span*>& slabs = begun(side);
  if (slabs.size() <= size.index || slabs[size.index] == nullptr) return nullptr;
  Span* span = slabs[size.index];
  zeroed = span->zeroed;
  Block* block = carve(span);
  if (span->carved_count == span->block_count) slabs[size.index] = nullptr;
  return block;
}

Block* SlabStore::begin(Side side, const SizeClass& size, bool any_size, bool& zeroed) {
  // Another thread may have begun one since the caller looked: the rest of that would never be handed out.
  if (Block* block = next(side, size, zeroed); block != nullptr) return block;
  Span* span = heap(side).take(next_span_bytes(side, size));
  if (span == nullptr && any_size) span = heap(side).take(round_to_granule(size.bytes));
  if (span == nullptr) return nullptr;
  try {
    prepare(span, size);
  } catch (...) {
    heap(side).give(span);
    throw;
  }
  if (span->block_count > 1) begun(side)[size.index] = span;
  zeroed = span->zeroed;
  return carve(span);
}

void SlabStore::prepare(Span* span, const SizeClass& size) {
  const bool large = size.bytes > kLargestSmall;
  const auto count = large ? 1u : static_cast<std::uint32_t>(span->bytes / size.bytes);
  std::vector<Span*>& slabs = begun(span->side);
  std::vector<std::uint32_t>& counts = slab_counts_[static_cast<int>(span->side)];
  if (slabs.size() <= size.index) slabs.resize(size.index + 1, nullptr);
  if (counts.size() <= size.index) counts.resize(size.index + 1, 0);
  if (span->block_capacity < count) {
    // First, so that a table which was taken is never lost: it may not be freed.
    if (block_tables_.size() == block_tables_.capacity()) block_tables_.reserve(2 * block_tables_.size() + 8);
    block_tables_.push_back(tables_.take(count));
    span->blocks.store(block_tables_.back().blocks.get(), std::memory_order_release);
    span->block_capacity = block_tables_.back().capacity;
  }
  if (!large) ++counts[size.index];
  span->set_block_bytes(size.bytes);
  span->class_index = size.index;
  span->carved_count = 0;
  span->block_count = count;
  span->state.store(Span::State::blocks, std::memory_order_release);
}

Block* SlabStore::carve(Span* span) noexcept {
  const std::uint32_t index = span->carved_count++;
  Block* block = &span->blocks.load(std::memory_order_relaxed)[index];
  block->start = span->block_at(index);
  return block;
}

std::size_t SlabStore::give_idle(Side side, std::vector<std::vector<Block*>>& bins) noexcept {
  std::size_t bytes = 0;
  for (auto& bin : bins) {
    for (const Block* block : bin) ++pages_.find(block->start)->idle_count;
    const auto kept = std::partition(bin.begin(), bin.end(), [&](const Block* block) {
      const Span* span = pages_.find(block->start);
      return span->idle_count != span->carved_count;
    });
    Span* idle = nullptr;  // a list through the spans themselves
    for (auto it = kept; it != bin.end(); ++it) {
      Span* span = pages_.find((*it)->start);
      bytes += span->block_bytes;
      if ((*it)->start == span->base) span->next_idle = std::exchange(idle, span);
    }
    bin.erase(kept, bin.end());
    for (const Block* block : bin) pages_.find(block->start)->idle_count = 0;
    while (idle != nullptr) {
      Span* span = std::exchange(idle, idle->next_idle);
      Span*& slab = begun(side)[span->class_index];
      if (slab == span) slab = nullptr;
      span->idle_count = 0;
      give(span);
    }
  }
  return bytes;
}

void SlabStore::take_free(std::size_t wanted, bool parts, std::vector<Span*>& spans) {
  if (!parts) {
    gpu_heap_.take_pieces(wanted, spans);
    cpu_heap_.take_pieces(wanted, spans);
    return;
  }
  // Granules only if whole huge pages were not enough: a huge page that is cut loses what makes it fast.
  for (const std::size_t step : {kHugePage, kGranule}) {
    gpu_heap_.take_parts(wanted, step, spans);
    cpu_heap_.take_parts(wanted, step, spans);
  }
}

bool SlabStore::resize(Span* span, const SizeClass& size) noexcept {
  if (!heap(span->side).resize(span, round_to_granule(size.bytes))) return false;
  span->set_block_bytes(size.bytes);
  span->class_index = size.index;
  return true;
}

Span* SlabStore::span_for(Side side, char* base, const SizeClass& size) {
  Span* span = heap(side).new_span(base, round_to_granule(size.bytes), pool_);
  try {
    prepare(span, size);
  } catch (...) {
    heap(side).forget(span);
    throw;
  }
  carve(span);
  return span;
}

}  // namespace rmm_bridge
