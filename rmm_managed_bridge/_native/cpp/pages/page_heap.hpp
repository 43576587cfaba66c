// Free spans of one side: best fit, split, and joined with their neighbours again. Only memory that no device work
// touches any more comes here, so that pieces may be cut and joined freely. Not thread-safe: the pool's lock covers it.
//
// Spans of upstreams that give parts have no chunk: neighbours join whichever pieces they came from, and any part of a free one may go
// back. Those of others stay inside of their chunk, which goes back as a whole.
#pragma once

#include <memory>
#include <set>
#include <vector>

#include "pages/page_map.hpp"
#include "pages/span.hpp"

namespace rmm_bridge {

class PageHeap {
 public:
  PageHeap(PageMap& pages, Side side) : pages_(pages), side_(side) {}

  // A span of exactly `bytes`, a multiple of a granule, from the smallest free one that has them, of these the lowest; null if there
  // is none. May throw bad_alloc, and then nothing has changed.
  Span* take(std::size_t bytes);

  // `span` becomes free. Cannot fail: see `spare_`.
  void give(Span* span) noexcept;

  // A fresh piece from upstream, which the page map has room for. `chunk` is null where parts of it may go back. May throw bad_alloc
  // before anything changes.
  void add(char* base, std::size_t bytes, Chunk* chunk, Pool* pool, bool zeroed);

  // Makes the span of one live block larger, by a free neighbour behind it, or smaller. False if that cannot be done; then nothing has
  // changed. Needs no memory to grow.
  bool resize(Span* span, std::size_t bytes) noexcept;

  // A span for a range that the page map has room for and knows nothing of yet: see `enter`. Throws std::bad_alloc.
  Span* new_span(char* base, std::size_t bytes, Pool* pool);
  void enter(Span* span) noexcept { pages_.set(span->base, span->bytes, span); }

  // What goes back to upstream is taken out and forgotten, up to `wanted` bytes, which are counted down: pieces that are free as a whole
  // and the one that reaches it; or parts of free spans that begin and end at multiples of `step`, the largest spans first and
  // their upper ends, since the next piece comes below the lowest one. Throws std::bad_alloc, and then those in `spans` are all that went.
  void take_pieces(std::size_t& wanted, std::vector<Span*>& spans);
  void take_parts(std::size_t& wanted, std::size_t step, std::vector<Span*>& spans);

  // A range that was taken out is upstream's, or somebody else's by now.
  void forget(Span* span) noexcept { recycle(span); }

  // It could not go back.
  void keep(Span* span, bool zeroed) noexcept {
    span->zeroed = zeroed;
    enter(span);
    give(span);
  }

  // The page map no longer leads to the span, whose memory goes elsewhere.
  void leave(Span* span) noexcept { pages_.set(span->base, span->bytes, nullptr); }

  std::size_t largest_free_bytes() const noexcept { return free_.empty() ? 0 : free_.rbegin()->bytes; }
  std::size_t free_bytes() const noexcept { return free_bytes_; }

  // Of free spans in pieces that cannot go back, since blocks lie in them.
  std::size_t pinned_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const Key& key : free_) bytes += key.span->chunk != nullptr && key.bytes != key.span->chunk->bytes ? key.bytes : 0;
    return bytes;
  }

 private:
  struct Key {
    std::size_t bytes;
    char* base;
    Span* span;
    bool operator<(const Key& other) const noexcept { return bytes != other.bytes ? bytes < other.bytes : base < other.base; }
  };

  Span* free_neighbour(const Span* span, const char* address) const noexcept;
  void absorb(Span* kept, Span* gone) noexcept;
  Span* cut(Span* span, char* low, char* high);
  void erase(Span* span) noexcept;
  void insert(Span* span) noexcept;
  void recycle(Span* span) noexcept;
  Span* new_span();

  PageMap& pages_;
  Side side_;
  std::set<Key> free_;
  std::size_t free_bytes_ = 0;
  // One set node for each span that is not in `free_`, made with the span: giving memory back never needs memory.
  std::vector<std::set<Key>::node_type> spare_;
  std::vector<Span*> unused_;
  std::vector<std::unique_ptr<Span>> all_;
};

}  // namespace rmm_bridge
