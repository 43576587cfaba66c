// Pool, the part about what the front has not got: the ladder of an allocation, down to growth.
#include "pool/stream_lookup.hpp"

namespace rmm_bridge {

// What the front has not got: from the lane, the ready lane, a slab, another lane, upstream, and then from what work
// still holds.
Refusal Pool::allocate_slowly(Want want, const KnownStream& stream, Grant& out) noexcept {
  process_.background.begin_again();
  try {
    const Advising advising{*this, out};
    Pins pins(*this);
    if (is_of_other_device(stream)) return Refusal::other_device;
    {
      std::scoped_lock lock(lock_);
      if (!stream.host()) {
        Lane& lane = lanes_.get(stream);
        want.lane = lane.index;
        want.held = lane.held();
        if (want.held) remember(lane);
      }
      if (take_idle(want, out)) return Refusal::none;
      pins.add(lanes_.at(want.lane));
    }
    if (!want.held) seen_again(want.lane, stream);
    if (poll() && with_lock([&] { return take_idle(want, out); })) return Refusal::none;
    if (with_lock([&] { return take_new(want, out, false); })) return Refusal::none;
    if (stream.host() && in_host_function()) {
      return with_lock([&] { return take_new(want, out, true); }) ? Refusal::none : Refusal::host_function;
    }
    if (KeepGil::kept()) return grow(want, out) ? Refusal::none : Refusal::out_of_memory;
    if (!stream.host() && steal(want, stream, out)) return Refusal::none;
    flush_deferred();
    if (wait_a_while(want, out)) return Refusal::none;
    if (make_room(want, out)) return Refusal::none;
    if (grow(want, out)) return Refusal::none;
    if (trim() != 0 && grow(want, out)) return Refusal::none;
    return look_last(want, out);
  } catch (const std::bad_alloc&) {
  }
  return Refusal::out_of_memory;
}

// Asked for a stream that has no lane yet, since an id never comes back. The legacy and the per-thread stream are those of the
// pool's context, whichever is current. The caller has seen that it is not being captured.
bool Pool::is_of_other_device(const KnownStream& stream) const {
  if (stream.host() || stream.legacy() || stream.per_thread() || stream.lane != nullptr) return false;
  if (with_lock([&] { return lanes_.find(stream.key) != nullptr; })) return false;
  return events_->other_device(stream.handle) >= 0;
}

bool Pool::take_idle(const Want& want, Grant& out) {
  const std::uint16_t ready = ready_lane(want.side);
  for (std::uint16_t index : {want.lane, ready}) {
    Lane& lane = lanes_.at(index);
    drain(lane, want.size);
    if (lane.bins.size() <= want.size.index || lane.bins[want.size.index].empty()) continue;
    auto& bin = lane.bins[want.size.index];
    Block* block = bin.back();
    bin.pop_back();
    lane.free_bytes -= want.size.bytes;
    refill(lane, want.size);
    hand_out(block, want, false, out);
    return true;
  }
  bool zeroed = false;
  Block* block = slabs_.next(want.side, want.size, zeroed);
  if (block == nullptr) return false;
  hand_out(block, want, zeroed, out);
  note_fresh(want, out);
  return true;
}

// `any_size`: a smaller slab than usual is better than none.
bool Pool::take_new(const Want& want, Grant& out, bool any_size) {
  bool zeroed = false;
  Block* block = slabs_.begin(want.side, want.size, any_size, zeroed);
  if (block == nullptr) return false;
  hand_out(block, want, zeroed, out);
  note_fresh(want, out);
  Span* span = process_.pages.find(block->start);
  if (advises(want.side)) {
    out.advice = process_.hugepages.settle(process_.pages, span->base, span->bytes, want.size.bytes >= kLeastAdvised);
  }
  return true;
}

void Pool::hand_out(Block* block, const Want& want, bool zeroed, Grant& out) noexcept {
  block->entry.store(0, std::memory_order_relaxed);
  block->lane.store(want.lane, std::memory_order_relaxed);
  block->flags.store(Block::kLive, std::memory_order_release);
  if (want.lane >= kFirstStreamLane) ++lanes_.at(want.lane).named_count;
  used_bytes_ += want.size.bytes;
  asked_bytes_ += want.asked_bytes;
  ++live_count_;
  if (!ordered()) budget_.note(live_now());  // else what streams freed last is still counted, until a drain
  out = {block->start, block, zeroed, want.held, {}, {}};
}

// Of a block that was never handed out before. Where a preset decides where new blocks go, it does so for these pages too.
void Pool::note_fresh(const Want& want, Grant& out) noexcept {
  if (!options_.populate || want.side != Side::gpu || want.size.bytes < kLeastPopulated) return;
  if (want.asked_bytes >= process_.least_hinted_bytes.load(std::memory_order_relaxed)) return;
  out.fresh = FreshPages::take(process_.pages, *process_.pages.find(out.ptr), out.ptr, want.size.bytes);
}

void Pool::put(Lane& lane, const Span* span, Block* block) {
  lane.bin(span->class_index).push_back(block);
  lane.free_bytes += span->block_bytes;
}

// Nothing touches the block any more: anybody of its side may have it.
void Pool::settle(Block* block) noexcept {
  Span* span = process_.pages.find(block->start);
  if (options_.debug) {
    settled_.push_back(span);
    return;
  }
  if (span->large()) {
    slabs_.give(span);
    return;
  }
  try {
    put(lanes_.at(ready_lane(span->side)), span, block);
  } catch (const std::bad_alloc&) {
    lost_bytes_ += span->block_bytes;  // see `deallocate_slowly`
  }
}

void Pool::advise(const Advice& advice) noexcept {
  if (advice.bytes == 0 || process_.hugepages.give(advice)) return;
  std::scoped_lock lock(lock_);
  process_.hugepages.failed(process_.pages, advice);
}

// `contended`, if given, becomes true where the limit refuses for what another thread is just asking upstream for.
bool Pool::grow(const Want& want, Grant& out, bool* contended) {
  bool unasked = false;
  bool& taken = contended == nullptr ? unasked : *contended;
  if (options_.debug) return grow_debug(want, out, taken);
  const std::size_t least = round_to_granule(want.size.bytes);
  std::size_t piece = 0, usual = 0;
  with_lock([&] {
    piece = piece_for(want);
    usual = slabs_.next_span_bytes(want.side, want.size);
  });
  std::size_t tried = 0;
  for (std::size_t bytes : {piece, usual, least}) {
    if (bytes == tried) continue;
    tried = bytes;
    // Another thread may take what this one has just added, or give it back. If that goes on there is no growth to be had, and the
    // ladder goes on.
    for (int turn = 0; turn < 3 && add_piece(bytes, want.side, taken); ++turn) {
      if (!with_lock([&] { return take_new(want, out, true); })) continue;
      watch(bytes);
      return true;
    }
  }
  return false;
}

// Before upstream is asked: what is reserved keeps it, see `close`. `contended` becomes true if the limit refuses only for what others
// have reserved and have not yet.
bool Pool::reserve(std::size_t bytes, bool& contended) noexcept {
  if (upstream_ == nullptr) return false;
  const std::size_t left = options_.limit_bytes - std::min(options_.limit_bytes, reserved_bytes_);
  if (bytes > left) {
    contended = contended || bytes <= left + adding_bytes_;
    return false;
  }
  reserved_bytes_ += bytes;
  adding_bytes_ += bytes;
  return true;
}

void Pool::end_reserving(std::size_t bytes, bool kept) noexcept {
  adding_bytes_ -= bytes;
  if (!kept) reserved_bytes_ -= bytes;
}

bool Pool::add_piece(std::size_t bytes, Side side, bool& contended) {
  auto chunk = parts_ ? nullptr : std::make_unique<Chunk>();
  WithoutGil without(process_);
  for (const std::size_t slack : {std::size_t{0}, kGranule}) {
    const std::size_t upstream_bytes = bytes + slack;
    {
      std::scoped_lock lock(lock_);
      if (!reserve(upstream_bytes, contended)) return false;
    }
    auto* raw = static_cast<char*>(upstream_->allocate(upstream_bytes));
    const auto number = reinterpret_cast<std::uintptr_t>(raw);
    const std::uintptr_t aligned = (number + kGranule - 1) & ~std::uintptr_t{kGranule - 1};
    if (raw != nullptr && (slack != 0 || aligned == number)) {
      auto* base = reinterpret_cast<char*>(aligned);
      if (chunk != nullptr) *chunk = {base, bytes, raw, upstream_bytes, side};
      try {
        process_.pages.reserve(base, bytes);
        with_lock([&] {
          slabs_.add(side, base, bytes, chunk.get(), gives_zeros_);
          end_reserving(upstream_bytes, true);
        });
        chunk.release();
        return true;
      } catch (const std::bad_alloc&) {
      }
    }
    // Not on a granule: others take pieces of other sizes from the same upstream. Once more, with room to align in.
    if (raw != nullptr) upstream_->deallocate(raw, upstream_bytes);
    std::scoped_lock lock(lock_);
    end_reserving(upstream_bytes, false);
    if (raw == nullptr || parts_) return false;
  }
  return false;
}

}  // namespace rmm_bridge
