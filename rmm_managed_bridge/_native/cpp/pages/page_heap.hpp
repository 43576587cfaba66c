// Free spans of one side: best fit, split, and joined with their neighbours again. Only memory that no device work
// touches any more comes here, so that pieces may be cut and joined freely. Not thread-safe: the pool's lock covers it.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "pages/page_map.hpp"
#include "pages/span.hpp"

namespace rmm_bridge {

class PageHeap {
 public:
  PageHeap(PageMap& pages, Side side) : pages_(pages), side_(side) {}

  // A span of exactly `bytes`, a multiple of a granule; null if no free span is large enough. May throw bad_alloc,
  // and then nothing has changed.
  Span* take(std::size_t bytes) {
    auto found = free_.lower_bound(Key{bytes, nullptr});
    if (found == free_.end()) return nullptr;
    Span* span = found->span;
    Span* rest = span->bytes > bytes ? new_span() : nullptr;  // the last thing here that can fail
    erase(span);
    if (rest != nullptr) {
      rest->chunk = span->chunk;
      rest->zeroed = span->zeroed;
      // Small spans come from the upper end, so that large blocks go on beginning at a huge page.
      const std::size_t lower = bytes < kHugePage ? span->bytes - bytes : bytes;
      rest->base = span->base + lower;
      rest->bytes = span->bytes - lower;
      rest->pool = span->pool;
      rest->side = side_;
      span->bytes = lower;
      pages_.set(rest->base, rest->bytes, rest);
      if (bytes < kHugePage) std::swap(span, rest);
      rest->state.store(Span::State::free);
      insert(rest);
    }
    return span;
  }

  // `span` becomes free. Cannot fail: see `spare_`.
  void give(Span* span) noexcept {
    if (Span* next = neighbour(span, span->base + span->bytes); next != nullptr) {
      erase(next);
      absorb(span, next);
    }
    if (Span* before = neighbour(span, span->base - 1); before != nullptr) {
      erase(before);
      absorb(before, span);
      span = before;
    }
    span->state.store(Span::State::free);
    span->block_count = 0;
    insert(span);
  }

  // A fresh piece from upstream, already in the page map's reserve. May throw bad_alloc before anything changes.
  Span* add_chunk(Chunk* chunk, Pool* pool, bool zeroed) {
    Span* span = new_span();
    span->chunk = chunk;
    span->zeroed = zeroed;
    span->base = chunk->base;
    span->bytes = chunk->bytes;
    span->pool = pool;
    span->side = side_;
    pages_.set(span->base, span->bytes, span);
    give(span);
    return span;
  }

  // Takes out chunks that are free as a whole, up to `wanted` bytes and the one that reaches it; the caller gives them
  // back to upstream. Throws std::bad_alloc and then has changed nothing.
  void take_free_chunks(std::size_t& wanted, std::vector<Chunk*>& chunks) {
    std::vector<Span*> whole;
    std::size_t missing = wanted;
    for (const Key& key : free_) {
      if (missing == 0) break;
      if (key.bytes != key.span->chunk->bytes) continue;
      whole.push_back(key.span);
      missing -= std::min(missing, key.bytes);
    }
    chunks.reserve(chunks.size() + whole.size());
    wanted = missing;
    for (Span* span : whole) {
      chunks.push_back(span->chunk);
      erase(span);
      pages_.set(span->base, span->bytes, nullptr);
      recycle(span);
    }
  }

  std::size_t largest_free_bytes() const noexcept { return free_.empty() ? 0 : free_.rbegin()->bytes; }

 private:
  struct Key {
    std::size_t bytes;
    Span* span;
    bool operator<(const Key& other) const noexcept { return bytes != other.bytes ? bytes < other.bytes : span < other.span; }
  };

  Span* neighbour(const Span* span, const char* address) const noexcept {
    Span* other = pages_.find(address);
    const bool joins =
        other != nullptr && other->pool == span->pool && other->chunk == span->chunk && other->state.load() == Span::State::free;
    return joins ? other : nullptr;
  }

  // `kept` grows over `gone`, which lies right behind it.
  void absorb(Span* kept, Span* gone) noexcept {
    kept->bytes += gone->bytes;
    kept->zeroed = kept->zeroed && gone->zeroed;
    pages_.set(gone->base, gone->bytes, kept);
    recycle(gone);
  }

  void erase(Span* span) noexcept { spare_.push_back(free_.extract(Key{span->bytes, span})); }

  void insert(Span* span) noexcept {
    auto node = std::move(spare_.back());
    spare_.pop_back();
    node.value() = Key{span->bytes, span};
    free_.insert(std::move(node));
  }

  void recycle(Span* span) noexcept {
    span->state.store(Span::State::unused);
    span->block_count = 0;
    unused_.push_back(span);
  }

  Span* new_span() {
    if (!unused_.empty()) {
      Span* span = unused_.back();
      unused_.pop_back();
      return span;
    }
    const std::size_t count = all_.size() + 1;
    unused_.reserve(count);
    spare_.reserve(count);
    auto span = std::make_unique<Span>();
    std::set<Key> nodes{Key{0, span.get()}};
    all_.push_back(std::move(span));
    spare_.push_back(nodes.extract(nodes.begin()));
    return all_.back().get();
  }

  PageMap& pages_;
  Side side_;
  std::set<Key> free_;
  // One set node for each span that is not in `free_`, made with the span: giving memory back never needs memory.
  std::vector<std::set<Key>::node_type> spare_;
  std::vector<Span*> unused_;
  std::vector<std::unique_ptr<Span>> all_;
};

}  // namespace rmm_bridge
