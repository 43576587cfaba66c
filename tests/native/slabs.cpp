// The slab store alone, over pieces straight from the kernel: a seeded random machine takes and gives blocks of all sizes as a
// pool does, with no memory for the store's own lists at each place in turn, and knows itself which bytes are whose.
// Pieces are whole, or parts of them go back and blocks change their size: by the seed.
//   slabs SEED STEPS
#include "failing_new.hpp"

#include <cstdio>
#include <cstring>
#include <map>
#include <random>

#include "pieces.hpp"

using namespace rmm_bridge;

namespace {

int problems = 0;
long step_number = 0;

void expect(bool right, const char* what) {
  if (right) return;
  if (++problems <= 20) std::fprintf(stderr, "step %ld: %s\n", step_number, what);
}

class Machine {
 public:
  explicit Machine(unsigned seed) : random_(seed), parts_(seed % 2 != 0) {}

  void run(long steps) {
    for (step_number = 0; step_number < steps && problems == 0; ++step_number) {
      const bool filling = (step_number / 200) % 2 == 0;
      const unsigned what = below(100);
      if (what < (filling ? 60u : 30u)) {
        take();
      } else if (what < 85) {
        if (!known_.empty()) free(any());
      } else if (what < 90) {
        if (parts_ && !known_.empty()) resize(any());
      } else if (what < 96) {
        give_idle(any_side());
      } else {
        take_free(below(4) == 0 ? ~std::size_t{0} : below(30) * kGranule, below(2) == 0);
      }
      if (step_number % 16 == 0) compare();
    }
    if (problems == 0) drain();
  }

 private:
  std::size_t below(std::size_t count) { return random_() % count; }
  Side any_side() { return below(2) == 0 ? Side::cpu : Side::gpu; }
  std::map<char*, Known>::iterator any() {
    const Piece& piece = std::next(pieces_.begin(), static_cast<std::ptrdiff_t>(below(pieces_.size())))->second;
    const auto found = known_.lower_bound(piece.base + below(piece.bytes));
    return found == known_.end() ? known_.begin() : found;
  }

  std::size_t any_bytes() {
    switch (below(4)) {
      case 0:
        return 1 + below(2000);
      case 1:
        return 1 + below(300'000);
      case 2:
        return (std::size_t{2} << 20) - 200'000 + below(400'000);  // around the largest that share a slab
      default:
        return 1 + below(6'000'000);
    }
  }

  // Blocks.

  void take() {
    const Side side = any_side();
    const std::size_t alignment = unit_of(side) << below(8);
    const SizeClass size = aligned_class(any_bytes(), alignment, unit_of(side));
    auto& bins = bins_[static_cast<int>(side)];
    if (below(2) == 0 && bins.size() > size.index && !bins[size.index].empty()) {
      Block* block = bins[size.index].back();
      bins[size.index].pop_back();
      Known& known = known_.at(block->start);
      expect(!known.live && known.block == block, "a block in a bin is not the one that was put there");
      known.live = true;
      return mark(known);
    }
    bool zeroed = false;
    Block* block = store_.next(side, size, zeroed);
    expect((block != nullptr) == (open_.count({side, size.index}) != 0), "whether a slab has a next block");
    if (block == nullptr) {
      // Two threads may have looked, and both begin one: between them is one slab.
      if (below(3) == 0) begin(side, size);
      begin(side, size);
    } else {
      handed_out(block, side, size, zeroed);
    }
  }

  void begin(Side side, const SizeClass& size) {
    const bool any_size = below(2) == 0;
    bool zeroed = false;
    Block* block = begin_or_fail(side, size, any_size, zeroed);
    if (block == nullptr) {
      const std::size_t usual = span_bytes_for(size.bytes, slabs(side, size));
      expect(store_.next_span_bytes(side, size) == usual, "the size of the next slab");
      const std::size_t least = any_size ? round_to_granule(size.bytes) : usual;
      expect(largest_free(side) < least, "there is a free span that is large enough");
      add(side, usual + below(40) * kGranule);
      block = begin_or_fail(side, size, any_size, zeroed);
    }
    expect(block != nullptr, "there is no block though there is room");
    if (block != nullptr) handed_out(block, side, size, zeroed);
  }

  Block* begin_or_fail(Side side, const SizeClass& size, bool any_size, bool& zeroed) {
    Block* block = nullptr;
    const auto before = granules();
    failing::at_each_place([&] { block = store_.begin(side, size, any_size, zeroed); },
                           [&] { expect(granules() == before, "a slab was half begun"); });
    return block;
  }

  void handed_out(Block* block, Side side, const SizeClass& size, bool zeroed) {
    char* start = block->start;
    Piece* piece = piece_of(start);
    if (piece == nullptr || piece->side != side) return expect(false, "a block lies in no piece of its side");
    Span* span = pages_.find(start);
    const bool found = span != nullptr && span == pages_.find(start + size.bytes - 1) && span->pool == nullptr &&
                       span->index_of(start) == span->index_of(start + size.bytes - 1) &&
                       &span->blocks.load()[span->index_of(start)] == block && span->block_bytes == size.bytes;
    if (!found) return expect(false, "a block's span does not lead to it");
    expect(reinterpret_cast<std::uintptr_t>(start) % std::min(size.bytes & -size.bytes, kGranule) == 0, "a block is not aligned");
    const auto after = known_.lower_bound(start);
    const bool apart = (after == known_.end() || start + size.bytes <= after->first) &&
                       (after == known_.begin() || std::prev(after)->first + std::prev(after)->second.size.bytes <= start);
    if (!apart) return expect(false, "two blocks overlap");
    if (auto open = open_.find({side, size.index}); open != open_.end()) {
      expect(open->second == span, "the rest of a slab was left behind");
    }
    const std::size_t count = size.bytes > kLargestSmall ? 1 : span->bytes / size.bytes;
    if (++carved_[span] < count) {
      open_[{side, size.index}] = span;
    } else {
      open_.erase({side, size.index});
    }
    if (parts_) {
      check_zero_parts(start, size.bytes, zeroed);
    } else {
      check_zeros(*piece, start, size.bytes, zeroed);
    }
    Known& known = known_[start] = {block, span, size, side, true, 0};
    mark(known);
  }

  void check_zeros(Piece& piece, char* start, std::size_t bytes, bool zeroed) {
    const auto offset = (start - piece.base) / 64;
    const auto from = piece.touched.begin() + offset, to = from + static_cast<std::ptrdiff_t>(bytes / 64);
    const bool fresh = piece.zeroed && std::find(from, to, true) == to;
    expect(fresh || !zeroed, "a block is said to be zero that was handed out before");
    const bool untouched = std::find(piece.touched.begin(), piece.touched.end(), true) == piece.touched.end();
    expect(zeroed || !piece.zeroed || !untouched, "a fresh piece is not said to be zero");
    const std::size_t looked = std::min<std::size_t>(bytes, 4096);
    const auto zero = [&](const char* at) { return at[0] == 0 && std::memcmp(at, at + 1, looked - 1) == 0; };
    expect(!zeroed || (zero(start) && zero(start + bytes - looked)), "a block is said to be zero and is not");
    std::fill(from, to, true);
  }

  void check_zero_parts(char* start, std::size_t bytes, bool zeroed) {
    for (char* at = start; at < start + bytes;) {
      Piece* piece = piece_of(at);
      if (piece == nullptr || piece->side != piece_of(start)->side) return expect(false, "a block lies in no pieces of its side");
      char* const end = std::min(piece->base + piece->bytes, start + bytes);
      const auto from = piece->touched.begin() + (at - piece->base) / 64, to = piece->touched.begin() + (end - piece->base) / 64;
      const bool fresh = piece->zeroed && std::find(from, to, true) == to;
      expect(fresh || !zeroed, "a block is said to be zero that was handed out before");
      expect(!zeroed || (at[0] == 0 && end[-1] == 0), "a block is said to be zero and is not");
      std::fill(from, to, true);
      at = end;
    }
  }

  void mark(Known& known) {
    known.mark = static_cast<unsigned char>(1 + below(255));
    std::memset(known.block->start, known.mark, 64);
    std::memset(known.block->start + known.size.bytes - 64, known.mark, 64);
  }

  void check_mark(const Known& known) {
    const char* start = known.block->start;
    for (std::size_t index = 0; index < 64; ++index) {
      const bool kept = static_cast<unsigned char>(start[index]) == known.mark &&
                        static_cast<unsigned char>(start[known.size.bytes - 1 - index]) == known.mark;
      expect(kept, "a live block was changed");
    }
  }

  // A large block, where it lies or with its pages.
  void resize(std::map<char*, Known>::iterator it) {
    Known& known = it->second;
    if (!known.live || !known.span->large()) return;
    check_mark(known);
    const SizeClass size = size_class(kLargestSmall + 1 + below(6'000'000), unit_of(known.side));
    char* const start = it->first;
    const std::size_t before = known.span->bytes, after = round_to_granule(size.bytes);
    std::size_t behind = 0;
    if (Span* next = pages_.find(start + before);
        next != nullptr && next->state == Span::State::free && next->side == known.side) {
      behind = next->bytes;
    }
    const bool resized = below(3) != 0 && store_.resize(known.span, size);
    if (resized) {
      expect(after <= before + behind, "a block grew over what is not free");
      expect(known.span->base == start && known.span->bytes == after && known.span->block_bytes == size.bytes, "its span");
      if (after > before) check_zero_parts(start + before, after - before, false);
    } else {
      move(known, size);
      if (problems != 0) return;
    }
    Known moved = known;
    moved.size = size;
    known_.erase(it);
    mark(known_[moved.block->start] = moved);
  }

  void move(Known& known, const SizeClass& size) {
    const std::size_t bytes = round_to_granule(size.bytes);
    char* const base = area_.allocate(bytes, below(2) == 0);
    pages_.reserve(base, bytes);
    Span* to = nullptr;
    const auto before = granules();
    failing::at_each_place([&] { to = store_.span_for(known.side, base, size); },
                           [&] { expect(granules() == before, "a span was half made"); });
    expect(pages_.find(base) == nullptr, "the page map leads to a place that nobody has moved to");
    Span* from = known.span;
    store_.leave(from);
    expect(pages_.find(from->base) == nullptr, "the page map leads to a place that was left");
    if (below(3) == 0) {  // and back
      store_.enter(from);
      store_.forget(to);
      area_.deallocate(base, bytes);
      to = store_.span_for(known.side, add_granules(known.side, bytes, true), size);
      store_.leave(from);
    } else {
      add_granules(known.side, base, bytes, true);
    }
    store_.enter(to);
    check_zero_parts(to->base, size.bytes, false);
    remove_granules(from->base, from->bytes);
    carved_.erase(from);
    carved_[to] = 1;
    store_.forget(from);
    known.span = to;
    known.block = &to->blocks.load()[0];
  }

  char* add_granules(Side side, std::size_t bytes, bool zeroed) {
    char* const base = area_.allocate(bytes, below(2) == 0);
    pages_.reserve(base, bytes);
    add_granules(side, base, bytes, zeroed);
    return base;
  }
  void add_granules(Side side, char* base, std::size_t bytes, bool zeroed) {
    for (char* at = base; at < base + bytes; at += kGranule) {
      pieces_[at] = {nullptr, side, kGranule, at, zeroed, std::vector<bool>(kGranule / 64)};
    }
  }
  void remove_granules(char* base, std::size_t bytes) {
    for (char* at = base; at < base + bytes; at += kGranule) pieces_.erase(at);
    area_.deallocate(base, bytes);  // whoever touches it now faults
  }

  void free(std::map<char*, Known>::iterator it) {
    Known& known = it->second;
    if (!known.live) return;
    check_mark(known);
    if (known.span->large()) {
      carved_.erase(known.span);
      store_.give(known.span);
      known_.erase(it);
      return;
    }
    auto& bins = bins_[static_cast<int>(known.side)];
    if (bins.size() <= known.size.index) bins.resize(known.size.index + 1);
    bins[known.size.index].push_back(known.block);
    known.live = false;
  }

  // What goes back.

  void give_idle(Side side) {
    std::map<Span*, bool> used;  // those of which a block is live
    for (const auto& [start, known] : known_) used[known.span] = used[known.span] || known.live;
    std::size_t bytes = 0, kept = 0;
    for (auto it = known_.begin(); it != known_.end();) {
      const Known& known = it->second;
      const bool goes = known.side == side && !used[known.span] && !known.span->large();
      kept += known.side == side && !known.live && !goes;
      bytes += goes ? known.size.bytes : 0;
      if (goes) {
        carved_.erase(known.span);
        std::erase_if(open_, [&](const auto& each) { return each.second == known.span; });
        it = known_.erase(it);
      } else {
        ++it;
      }
    }
    auto& bins = bins_[static_cast<int>(side)];
    std::size_t given = 0;
    failing::survives(0, [&] { given = store_.give_idle(side, bins); });
    expect(failing::calls == 0, "giving slabs back needs memory");
    expect(given == bytes, "the bytes of slabs that went");
    for (const auto& bin : bins) {
      kept -= bin.size();
      for (const Block* block : bin) expect(known_.count(block->start) != 0, "a block is in a bin whose slab went");
    }
    expect(kept == 0, "other blocks are left in the bins");
    for (const auto& [start, known] : known_) expect(known.span->idle_count == 0, "a count is left for the next time");
  }

  void add(Side side, std::size_t bytes) {
    char* const base = area_.allocate(bytes, below(2) == 0);
    const bool zeroed = below(3) != 0;
    if (!zeroed) std::memset(base, 0xee, bytes);
    std::unique_ptr<Chunk> chunk;
    if (!parts_) chunk = std::make_unique<Chunk>(base, bytes, base, bytes, side);
    pages_.reserve(base, bytes);
    const auto before = granules();
    failing::at_each_place([&] { store_.add(side, base, bytes, chunk.get(), zeroed); },
                           [&] { expect(granules() == before && pages_.find(base) == nullptr, "a piece was half added"); });
    if (parts_) {
      add_granules(side, base, bytes, zeroed);
    } else {
      pieces_[base] = {std::move(chunk), side, bytes, base, zeroed, std::vector<bool>(bytes / 64)};
    }
  }

  void take_free(std::size_t wanted, bool fails) {
    std::size_t free_bytes = 0, taken = 0;
    const auto in_use = used();
    for (const auto& [base, piece] : pieces_) free_bytes += piece.is_free(in_use) ? piece.bytes : 0;
    if (parts_) expect(store_.free_bytes() == free_bytes, "the bytes that are free");
    std::vector<Span*> spans;
    const auto take = [&] { store_.take_free(wanted, parts_, spans); };
    if (fails) {
      failing::at_each_place(take, [&] {
        std::map<char*, Span*> went;
        for (Span* span : spans) went[span->base] = span;
        for (const auto& [base, piece] : pieces_) {
          const auto after = went.upper_bound(base);
          const bool gone = after != went.begin() && base < std::prev(after)->first + std::prev(after)->second->bytes;
          expect((pages_.find(base) == nullptr) == gone, "other pieces went than were named");
        }
      });
    } else {
      take();
    }
    for (const Span* span : spans) taken += span->bytes;
    expect(taken >= std::min(wanted, free_bytes), "fewer bytes went than were free");
    if (!fails && !spans.empty()) {
      expect(parts_ ? taken < wanted + kHugePage || wanted > taken : taken - spans.back()->bytes < wanted,
             "more went than was wanted");
    }
    for (Span* span : spans) {
      const bool kept = parts_ && below(4) == 0;
      for (char* at = span->base; at < span->base + span->bytes;) {
        expect(pages_.find(at) == nullptr, "a piece that went is still in the page map");
        const auto found = pieces_.find(at);
        if (found == pieces_.end() || !found->second.is_free(in_use))
          return expect(false, "a piece went that blocks lie in, or twice");
        at += parts_ ? kGranule : found->second.bytes;
        if (kept) {
          found->second.zeroed = true;
          found->second.touched.assign(kGranule / 64, false);
        }
      }
      if (kept) {
        ::madvise(span->base, span->bytes, MADV_DONTNEED);
        store_.keep(span, true);
        continue;
      }
      if (parts_) {
        remove_granules(span->base, span->bytes);
      } else {
        area_.deallocate(span->base, span->bytes);
        pieces_.erase(span->base);
      }
      store_.forget(span);
    }
  }

  void drain() {
    while (problems == 0) {
      auto live = std::find_if(known_.begin(), known_.end(), [](const auto& each) { return each.second.live; });
      if (live == known_.end()) break;
      free(live);
    }
    for (const Side side : {Side::cpu, Side::gpu}) give_idle(side);
    compare();
    expect(known_.empty(), "blocks are left");
    for (int turn = 0; turn < 50 && !pieces_.empty(); ++turn) take_free(~std::size_t{0}, false);
    expect(pieces_.empty() && store_.largest_free_bytes() == 0, "pieces are left though no block is");
  }

  // What the page map says.

  Piece* piece_of(const char* address) {
    auto after = pieces_.upper_bound(const_cast<char*>(address));
    if (after == pieces_.begin()) return nullptr;
    Piece& piece = std::prev(after)->second;
    return address < piece.base + piece.bytes ? &piece : nullptr;
  }

  // Where the spans are that have blocks.
  std::map<char*, char*> used() const {
    std::map<char*, char*> found;
    for (const auto& [span, count] : carved_) found[span->base] = span->base + span->bytes;
    return found;
  }

  std::vector<Granule> granules() const {
    std::vector<Granule> found;
    for (const auto& [base, piece] : pieces_) {
      for (std::size_t at = 0; at < piece.bytes; at += kGranule) {
        Span* span = pages_.find(base + at);
        found.push_back({span, span->state.load(), span->zeroed});
      }
    }
    return found;
  }

  // How many slabs of a class there are, all or in part handed out.
  std::size_t slabs(Side side, const SizeClass& size) const {
    std::map<const Span*, bool> found;
    for (const auto& [start, known] : known_) {
      if (known.side == side && known.size.index == size.index && !known.span->large()) found[known.span] = true;
    }
    return found.size();
  }

  std::size_t largest_free(Side side) const {
    std::size_t largest = 0;
    for (const auto& [base, piece] : pieces_) {
      if (piece.side != side) continue;
      for (std::size_t at = 0; at < piece.bytes; at += kGranule) {
        const Span* span = pages_.find(base + at);
        if (span->state == Span::State::free) largest = std::max(largest, span->bytes);
      }
    }
    return largest;
  }

  // Each piece is spans, one behind the other; two that are free are one, if parts go back also across pieces of one side.
  void compare() {
    char* end = nullptr;  // of what was looked at
    const Piece* before = nullptr;
    const Span* last = nullptr;
    for (const auto& [base, piece] : pieces_) {
      const bool behind = parts_ && before != nullptr && before->base + before->bytes == base && before->side == piece.side;
      if (!behind) last = nullptr;
      before = &piece;
      for (char* at = std::max(base, end); at < base + piece.bytes; at = end) {
        const Span* span = pages_.find(at);
        if (span == nullptr || span->base != at || span->bytes == 0) return expect(false, "a piece has a hole");
        for (std::size_t inside = 0; inside < span->bytes; inside += kGranule) {
          expect(pages_.find(span->base + inside) == span, "a span that is not all of one");
        }
        const bool free = span->state == Span::State::free;
        expect(free == (carved_.count(const_cast<Span*>(span)) == 0), "a span is free though blocks are in it, or is not");
        expect(!free || last == nullptr || last->state != Span::State::free, "two free spans are not joined");
        last = span;
        end = at + span->bytes;
      }
    }
    expect(store_.largest_free_bytes() == std::max(largest_free(Side::cpu), largest_free(Side::gpu)), "the largest free span");
  }

  std::mt19937 random_;
  const bool parts_;
  Area area_;
  PageMap& pages_ = *new PageMap();
  BlockTables tables_;
  SlabStore store_{pages_, tables_, nullptr};
  std::map<char*, Piece> pieces_;
  std::map<char*, Known> known_;
  std::map<Span*, std::size_t> carved_;
  std::map<std::pair<Side, std::uint32_t>, Span*> open_;  // slabs with a rest
  std::vector<std::vector<Block*>> bins_[2];
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Machine(static_cast<unsigned>(std::atoi(argv[1]))).run(std::atol(argv[2]));
  std::printf("%d problems\n", problems);
  return problems == 0 ? 0 : 1;
}
