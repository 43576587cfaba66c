// The memory of one pool as blocks: slabs of equal small ones and spans of their own for large ones, of both sides. Knows nothing of
// streams: what it hands out nothing has touched yet, and what comes back nothing touches any more. Not thread-safe: the pool's
// lock covers it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "pages/block_tables.hpp"
#include "pages/page_heap.hpp"
#include "pages/size_class.hpp"
#include "pages/span.hpp"

namespace rmm_bridge {

constexpr std::size_t round_to_granule(std::size_t bytes) { return (bytes + kGranule - 1) & ~(kGranule - 1); }

// The span for the next block of a class that has `slab_count` slabs. The first slabs are small: with 16 MiB for the first block of
// 2 MiB, a program that has a few blocks of each size reserves several times what it uses.
constexpr std::size_t span_bytes_for(std::size_t block_bytes, std::size_t slab_count) {
  if (block_bytes > kLargestSmall) return block_bytes;
  const std::size_t doubled = kGranule << std::min<std::size_t>(slab_count, 8);
  const std::size_t most = std::max<std::size_t>(std::size_t{512} << 10, round_to_granule(4 * block_bytes));
  return std::min(std::max(doubled, round_to_granule(block_bytes)), most);
}

class SlabStore {
 public:
  // `pool` is what its spans say they are of.
  SlabStore(PageMap& pages, BlockTables& tables, Pool* pool) : pages_(pages), tables_(tables), pool_(pool) {}

  // The pool has ended, and nothing is reserved any more.
  void end() noexcept { tables_.give(std::move(block_tables_)); }

  // The next block of a slab that has been begun, or null. `zeroed`: its bytes are zero.
  Block* next(Side side, const SizeClass& size, bool& zeroed) noexcept;

  // The next block of a slab, if need be of a new one, or the one of a new span; null if no free span is large enough. `any_size`: a smaller slab than
  // usual is better than none. Throws std::bad_alloc and then has changed nothing.
  Block* begin(Side side, const SizeClass& size, bool any_size, bool& zeroed);

  // Of the span that `begin` would take now.
  std::size_t next_span_bytes(Side side, const SizeClass& size) const noexcept {
    const auto& counts = slab_counts_[static_cast<int>(side)];
    return span_bytes_for(size.bytes, size.index < counts.size() ? counts[size.index] : 0);
  }

  // The whole span of a large block, or of a slab, is free again.
  void give(Span* span) noexcept {
    if (!span->large()) --slab_counts_[static_cast<int>(span->side)][span->class_index];
    span->zeroed = false;
    heap(span->side).give(span);
  }

  // Slabs whose blocks all lie in `bins`, which are by class and of one side, become free spans. Returns their bytes. Needs no
  // memory: it is what an allocation that failed does next.
  std::size_t give_idle(Side side, std::vector<std::vector<Block*>>& bins) noexcept;

  // A piece from upstream that the page map has room for. `chunk` is null where parts of it may go back. Throws std::bad_alloc and then
  // has changed nothing.
  void add(Side side, char* base, std::size_t bytes, Chunk* chunk, bool zeroed) {
    heap(side).add(base, bytes, chunk, pool_, zeroed);
  }

  // Takes out free memory of about `wanted` bytes, as parts or in whole pieces, and appends it: the caller gives it back. It is in
  // nobody's list until the caller says what became of each span. Throws std::bad_alloc, and then those in `spans` are all that went.
  void take_free(std::size_t wanted, bool parts, std::vector<Span*>& spans);
  void forget(Span* span) noexcept { heap(span->side).forget(span); }
  void keep(Span* span, bool zeroed) noexcept { heap(span->side).keep(span, zeroed); }

  // Makes the span of a live large block another size, in place; false if that cannot be done, and then nothing has changed.
  bool resize(Span* span, const SizeClass& size) noexcept;

  // The span of a large block in memory that the page map has room for, and is not led to yet; throws std::bad_alloc. `leave` ends that
  // the page map leads to a span, and `enter` begins it.
  Span* span_for(Side side, char* base, const SizeClass& size);
  void leave(Span* span) noexcept { heap(span->side).leave(span); }
  void enter(Span* span) noexcept { heap(span->side).enter(span); }

  std::size_t largest_free_bytes() const noexcept {
    return std::max(cpu_heap_.largest_free_bytes(), gpu_heap_.largest_free_bytes());
  }
  std::size_t free_bytes() const noexcept { return cpu_heap_.free_bytes() + gpu_heap_.free_bytes(); }
  std::size_t pinned_bytes() const noexcept { return cpu_heap_.pinned_bytes() + gpu_heap_.pinned_bytes(); }

 private:
  PageHeap& heap(Side side) noexcept { return side == Side::cpu ? cpu_heap_ : gpu_heap_; }
  std::vector<Span*>& begun(Side side) noexcept { return begun_[static_cast<int>(side)]; }
  void prepare(Span* span, const SizeClass& size);
  static Block* carve(Span* span) noexcept;

  PageMap& pages_;
  BlockTables& tables_;
  Pool* pool_;
  PageHeap cpu_heap_{pages_, Side::cpu};
  PageHeap gpu_heap_{pages_, Side::gpu};
  std::vector<Span*> begun_[2];                // by side and class: the slab whose rest was never handed out
  std::vector<std::uint32_t> slab_counts_[2];  // by side and class
  std::vector<BlockTable> block_tables_;
};

}  // namespace rmm_bridge
