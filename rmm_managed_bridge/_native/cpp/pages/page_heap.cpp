#include "pages/page_heap.hpp"

#include <algorithm>

namespace rmm_bridge {

namespace {

char* round_up(char* address, std::size_t step) noexcept {
  return reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(address) + step - 1) / step * step);
}

char* round_down(char* address, std::size_t step) noexcept {
  return reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(address) / step * step);
}

}  // namespace

Span* PageHeap::take(std::size_t bytes) {
  const auto found = free_.lower_bound(Key{bytes, nullptr, nullptr});
  if (found == free_.end()) return nullptr;
  // Small spans come from the upper end, so that large blocks go on beginning at a huge page.
  char* const base = found->base + (bytes < kHugePage ? found->bytes - bytes : 0);
  Span* span = cut(found->span, base, base + bytes);
  span->state.store(Span::State::unused);
  return span;
}

void PageHeap::give(Span* span) noexcept {
  if (Span* next = free_neighbour(span, span->base + span->bytes); next != nullptr) {
    erase(next);
    absorb(span, next);
  }
  if (Span* before = free_neighbour(span, span->base - 1); before != nullptr) {
    erase(before);
    absorb(before, span);
    span = before;
  }
  span->state.store(Span::State::free);
  span->block_count = 0;
  insert(span);
}

void PageHeap::add(char* base, std::size_t bytes, Chunk* chunk, Pool* pool, bool zeroed) {
  Span* span = new_span(base, bytes, pool);
  span->chunk = chunk;
  span->zeroed = zeroed;
  enter(span);
  give(span);
}

bool PageHeap::resize(Span* span, std::size_t bytes) noexcept {
  if (bytes < span->bytes) {
    Span* tail = nullptr;
    try {
      tail = new_span(span->base + bytes, span->bytes - bytes, span->pool);
    } catch (const std::bad_alloc&) {
      return false;
    }
    tail->chunk = span->chunk;
    span->bytes = bytes;
    enter(tail);
    give(tail);
  } else if (bytes > span->bytes) {
    const std::size_t more = bytes - span->bytes;
    Span* next = free_neighbour(span, span->base + span->bytes);
    if (next == nullptr || next->bytes < more) return false;
    erase(next);
    pages_.set(next->base, more, span);
    span->bytes = bytes;
    next->base += more;
    next->bytes -= more;
    if (next->bytes == 0) {
      recycle(next);
    } else {
      insert(next);
    }
  }
  return true;
}

void PageHeap::take_pieces(std::size_t& wanted, std::vector<Span*>& spans) {
  std::vector<Span*> whole;
  std::size_t missing = wanted;
  for (const Key& key : free_) {
    if (missing == 0) break;
    if (key.span->chunk == nullptr || key.bytes != key.span->chunk->bytes) continue;
    whole.push_back(key.span);
    missing -= std::min(missing, key.bytes);
  }
  spans.reserve(spans.size() + whole.size());
  wanted = missing;
  for (Span* span : whole) {
    erase(span);
    span->state.store(Span::State::unused);
    leave(span);
    spans.push_back(span);
  }
}

void PageHeap::take_parts(std::size_t& wanted, std::size_t step, std::vector<Span*>& spans) {
  for (auto behind = free_.end(); wanted != 0 && behind != free_.begin();) {
    const Key key = *std::prev(behind);
    char* low = round_up(key.base, step);
    char* const high = round_down(key.base + key.bytes, step);
    if (low >= high) {
      --behind;
      continue;
    }
    if (static_cast<std::size_t>(high - low) > wanted) low = std::max(low, round_down(high - wanted, step));
    spans.reserve(spans.size() + 1);
    Span* part = cut(key.span, low, high);
    part->state.store(Span::State::unused);
    leave(part);
    spans.push_back(part);
    wanted -= std::min(wanted, part->bytes);
    behind = free_.lower_bound(key);  // what is left of the span is smaller
  }
}

// A neighbour of another chunk does not join: each chunk goes back as it came.
Span* PageHeap::free_neighbour(const Span* span, const char* address) const noexcept {
  Span* other = pages_.find(address);
  const bool joins = other != nullptr && other->pool == span->pool && other->side == span->side && other->chunk == span->chunk &&
                     other->state.load() == Span::State::free;
  return joins ? other : nullptr;
}

// `kept` grows over `gone`, which lies right behind it.
void PageHeap::absorb(Span* kept, Span* gone) noexcept {
  kept->bytes += gone->bytes;
  kept->zeroed = kept->zeroed && gone->zeroed;
  pages_.set(gone->base, gone->bytes, kept);
  recycle(gone);
}

// Takes [low, high) out of a free span and returns it as a span; what lies before and behind stays free. The span at the lower end is
// the one that was there. Throws std::bad_alloc and then has changed nothing.
Span* PageHeap::cut(Span* span, char* low, char* high) {
  char* const end = span->base + span->bytes;
  Span* const part = low > span->base ? new_span(low, static_cast<std::size_t>(high - low), span->pool) : span;
  Span* rest = nullptr;
  if (high < end) {
    try {
      rest = new_span(high, static_cast<std::size_t>(end - high), span->pool);
    } catch (...) {
      if (part != span) recycle(part);
      throw;
    }
  }
  erase(span);
  for (Span* fresh : {part, rest}) {
    if (fresh == nullptr || fresh == span) continue;
    fresh->chunk = span->chunk;
    fresh->zeroed = span->zeroed;
    enter(fresh);
  }
  span->bytes = static_cast<std::size_t>((part == span ? high : low) - span->base);
  if (rest != nullptr) {
    rest->state.store(Span::State::free);
    insert(rest);
  }
  if (part != span) insert(span);
  return part;
}

void PageHeap::erase(Span* span) noexcept {
  free_bytes_ -= span->bytes;
  spare_.push_back(free_.extract(Key{span->bytes, span->base, span}));
}

void PageHeap::insert(Span* span) noexcept {
  free_bytes_ += span->bytes;
  auto node = std::move(spare_.back());
  spare_.pop_back();
  node.value() = Key{span->bytes, span->base, span};
  free_.insert(std::move(node));
}

void PageHeap::recycle(Span* span) noexcept {
  span->state.store(Span::State::unused);
  span->block_count = 0;
  span->chunk = nullptr;
  unused_.push_back(span);
}

Span* PageHeap::new_span(char* base, std::size_t bytes, Pool* pool) {
  Span* span = new_span();
  span->chunk = nullptr;
  span->zeroed = false;
  span->base = base;
  span->bytes = bytes;
  span->pool = pool;
  span->side = side_;
  return span;
}

Span* PageHeap::new_span() {
  if (!unused_.empty()) {
    Span* span = unused_.back();
    unused_.pop_back();
    return span;
  }
  const std::size_t count = all_.size() + 1;
  unused_.reserve(count);
  spare_.reserve(count);
  auto span = std::make_unique<Span>();
  std::set<Key> nodes{Key{0, nullptr, span.get()}};
  all_.push_back(std::move(span));
  spare_.push_back(nodes.extract(nodes.begin()));
  return all_.back().get();
}

}  // namespace rmm_bridge
