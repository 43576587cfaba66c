// Pool, the part about the work on live blocks: waiting for it, ordering a stream behind it, and taking over what another
// stream freed.
#include "pool/stream_lookup.hpp"

namespace rmm_bridge {

// Sets a flag of a live block; false if it is not live any more. Whoever frees the block, on any thread, sees the flag.
bool Pool::mark(Process& process, Block* block, std::uint8_t flag) noexcept {
  if (const auto id = block->entry.load(std::memory_order_acquire); id != 0) {
    return process.ledger.while_open(id, reinterpret_cast<std::uintptr_t>(block->start), [&] { block->flags.fetch_or(flag); });
  }
  std::uint8_t flags = block->flags.load();
  while ((flags & Block::kLive) != 0) {
    if (block->flags.compare_exchange_weak(flags, flags | flag)) return true;
  }
  return false;
}

void Pool::record_stream(Block* block, const char* ptr, const StreamRef& stream) {
  if (driver_ == nullptr || stream.host() || !mark(process_, block, Block::kShown)) return;
  std::scoped_lock lock(lock_);
  Lane& lane = lanes_.get(stream);
  if (lane.held()) remember(lane);
  auto& uses = stream_uses_[ptr];
  if (std::find(uses.begin(), uses.end(), lane.index) == uses.end()) {
    uses.push_back(lane.index);
    ++lane.named_count;
  }
}

Refusal Pool::synchronize(Block* block, const char* ptr) {
  if (driver_ == nullptr) return Refusal::none;
  if (options_.device_wait) return synchronize_device();
  std::vector<EventRef> events;
  const Refusal refusal = events_of(block, ptr, events, options_.cautious);
  return refusal == Refusal::none ? wait_for(events) : refusal;
}

Refusal Pool::synchronize_all() {
  if (driver_ == nullptr || !acts()) return Refusal::none;
  std::vector<EventRef> events;
  Refusal refusal = Refusal::none;
  {
    Pins pins(*this);
    with_lock([&] { pin_held(pins); });
    const WithoutGil without(process_);
    for (const std::uint16_t index : pins) {
      EventRef event;
      const Recorded recorded = events_->record(lanes_.at(index).stream, event);
      if (recorded == Recorded::done) {
        events.push_back(std::move(event));
      } else {
        refusal = recorded == Recorded::capturing ? Refusal::capturing : Refusal::bad_stream;
      }
    }
  }
  return refusal == Refusal::none ? wait_for(events) : refusal;
}

Refusal Pool::wait_for(const std::vector<EventRef>& events) {
  Refusal refusal = Refusal::none;
  WithoutGil without(process_);
  for (const EventRef& event : events) {
    if (!events_->synchronize(event)) refusal = Refusal::bad_stream;
  }
  return refusal;
}

Refusal Pool::order(Block* block, const char* ptr, const StreamRef& stream) {
  if (driver_ == nullptr || stream.host()) return Refusal::none;
  std::vector<EventRef> events;
  const Refusal refusal = events_of(block, ptr, events, false, stream.key);
  if (refusal != Refusal::none) return refusal;
  {
    const WithoutGil without(process_);
    for (const EventRef& event : events) {
      if (!events_->stream_waits(stream, event)) return Refusal::capturing;
    }
  }
  record_stream(block, ptr, stream);
  return Refusal::none;
}

// Events behind the work that may touch a live block: on its lanes, and if `cautious` on every lane whose stream is
// held, and behind streams that were let go. A lane of the block that takes part in a capture, or whose stream nobody holds, is a
// refusal; another one is left out. `except`: the stream that is to come after the work; what it did itself needs no event.
Refusal Pool::events_of(const Block* block, const char* ptr, std::vector<EventRef>& events, bool cautious, std::uint64_t except) {
  static const std::vector<std::uint16_t> kNone;
  Pins pins(*this), departed(*this);
  std::vector<Quarantine::WaitFor> departures;
  std::size_t required = 0;
  {
    std::scoped_lock lock(lock_);
    const auto uses = stream_uses_.find(ptr);
    required = pin_lanes_of(block->lane.load(), uses == stream_uses_.end() ? kNone : uses->second, cautious, pins);
    if (cautious) pin_departures(departed, departures);
  }
  for (Quarantine::WaitFor& each : departures) events.push_back(std::move(each.event));
  Refusal refusal = Refusal::none;
  const WithoutGil without(process_);
  std::size_t position = 0;
  for (const std::uint16_t index : pins) {
    const bool must = position++ < required;
    const Lane& lane = lanes_.at(index);
    if (lane.stream.key == except) continue;
    if (!lane.held()) {
      refusal = Refusal::unheld_stream;  // never a cautious one: those are held
      continue;
    }
    EventRef event;
    const Recorded recorded = events_->record(lane.stream, event);
    if (recorded == Recorded::done) {
      events.push_back(std::move(event));
    } else if (must) {
      refusal = recorded == Recorded::capturing ? Refusal::capturing : Refusal::bad_stream;
    }
  }
  return refusal;
}

// The one context-wide call, for devices without concurrentManagedAccess. Any capture in the context would be destroyed, so
// it is refused while a stream takes part in one that the bridge knows of.
Refusal Pool::synchronize_device() {
  bool capturing = events_->legacy_is_blocked();
  {
    Pins pins(*this);
    with_lock([&] { pin_held(pins); });
    for (const std::uint16_t index : pins) {
      capturing = capturing || events_->capture_status(lanes_.at(index).stream.handle) != CU_STREAM_CAPTURE_STATUS_NONE;
    }
  }
  if (capturing) return Refusal::capturing;
  WithoutGil without(process_);
  return events_->synchronize_device() ? Refusal::none : Refusal::bad_stream;
}

void Pool::pin_held(Pins& pins) {
  lanes_.for_each_stream([&](Lane& lane) {
    if (lane.held()) pins.add(lane);
  });
}

// Takes a whole bin of another lane: one event and one wait serve all its blocks.
bool Pool::steal(const Want& want, const StreamRef& stream, Grant& out) {
  InHand in_hand(*this);
  Pins pins(*this);
  std::vector<Block*> blocks;
  std::vector<Quarantine::WaitFor> waits;
  std::size_t bytes = 0;
  Lane* from = nullptr;
  bool held = false;
  {
    std::scoped_lock lock(lock_);
    lanes_.for_each_stream([&](Lane& lane) {
      drain(lane);
      const bool has = lane.bins.size() > want.size.index && !lane.bins[want.size.index].empty();
      if (from == nullptr && has && lane.index != want.lane) from = &lane;
    });
    if (from == nullptr) return false;
    pins.add(*from);
    pins.add(lanes_.at(want.lane));
    held = from->held();
    for (const EventRef& event : from->events) waits.push_back({from->index, event});
    blocks.swap(from->bins[want.size.index]);
    in_hand.begin();
    bytes = blocks.size() * want.size.bytes;
    from->free_bytes -= bytes;
  }
  bool ordered = true;
  const WithoutGil without(process_);
  try {
    if (held) {
      EventRef event;
      ordered = events_->record(from->stream, event) == Recorded::done;
      waits.push_back({from->index, std::move(event)});
    }
    for (const Quarantine::WaitFor& wait : waits) ordered = ordered && events_->stream_waits(stream, wait.event);
    std::scoped_lock lock(lock_);
    if (!ordered) {
      quarantine(std::move(blocks), bytes, waits);
      return false;
    }
    Lane& mine = lanes_.at(want.lane);
    auto& bin = mine.bin(want.size.index);
    bin.reserve(bin.size() + blocks.size());
    if (!mine.held()) {
      // The rest of the bin is as unfinished as before, for everybody but this stream.
      mine.events.reserve(mine.events.size() + waits.size());
      for (const Quarantine::WaitFor& wait : waits) mine.events.push_back(wait.event);
    }
    bin.insert(bin.end(), blocks.begin(), blocks.end());
    mine.free_bytes += bytes;
    return take_idle(want, out);
  } catch (const std::bad_alloc&) {
    // What was taken has no place any more.
    std::scoped_lock lock(lock_);
    lost_bytes_ += bytes;
    throw;
  }
}

}  // namespace rmm_bridge
