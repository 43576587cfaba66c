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

void Pool::expose(Block* block, const char* ptr, const StreamRef& stream) {
  if (driver_ == nullptr || stream.host() || !mark(process_, block, Block::kExposed)) return;
  std::scoped_lock lock(lock_);
  Lane& lane = lanes_.get(stream);
  if (lane.owned) remember(lane);
  auto& seen = exposures_[ptr];
  if (std::find(seen.begin(), seen.end(), lane.index) == seen.end()) {
    seen.push_back(lane.index);
    ++lane.live_count;
  }
}

Refusal Pool::synchronize(Block* block, const char* ptr) {
  if (driver_ == nullptr) return Refusal::none;
  if (options_.device_wait) return synchronize_device();
  std::vector<EventRef> events;
  const Refusal refusal = events_of(block, ptr, events, options_.cautious);
  for (EventRef& event : work_of_departed()) events.push_back(std::move(event));
  return refusal == Refusal::none ? wait_for(events) : refusal;
}

Refusal Pool::synchronize_all() {
  if (driver_ == nullptr || !process_.running()) return Refusal::none;
  std::vector<std::uint16_t> lanes;
  with_lock([&] {
    lanes_.for_each_stream([&](const Lane& lane) {
      if (lane.owned) lanes.push_back(lane.index);
    });
    hold(lanes);
  });
  Refusal refusal = Refusal::none;
  std::vector<EventRef> events;
  for (std::uint16_t index : lanes) {
    EventRef event;
    const Recorded recorded = events_->record(lanes_.at(index).stream, event);
    if (recorded == Recorded::done) {
      events.push_back(std::move(event));
    } else {
      refusal = recorded == Recorded::capturing ? Refusal::capturing : Refusal::bad_stream;
    }
  }
  with_lock([&] { release(lanes); });
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
  for (const EventRef& event : events) {
    if (!events_->stream_waits(stream, event)) return Refusal::capturing;
  }
  expose(block, ptr, stream);
  return Refusal::none;
}

// Events behind the work that may touch a live block: on its lanes, and if `cautious` on every lane whose stream is
// held. A lane of the block that takes part in a capture, or whose stream nobody holds, is a refusal; another one is left
// out. `except`: the stream that is to come after the work; what it did itself needs no event.
Refusal Pool::events_of(const Block* block, const char* ptr, std::vector<EventRef>& events, bool cautious,
                               std::uint64_t except) {
  std::vector<std::uint16_t> lanes;
  std::size_t required;
  {
    std::scoped_lock lock(lock_);
    lanes = lanes_of(block->lane.load(), ptr, required);
    if (!cautious) lanes.resize(required);
    hold(lanes);
  }
  Refusal refusal = Refusal::none;
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const Lane& lane = lanes_.at(lanes[i]);
    if (lane.stream.key == except) continue;
    if (!lane.owned) {
      refusal = Refusal::unheld_stream;  // never a cautious one: those are owned
      continue;
    }
    EventRef event;
    const Recorded recorded = events_->record(lane.stream, event);
    if (recorded == Recorded::done) {
      events.push_back(std::move(event));
    } else if (i < required) {
      refusal = recorded == Recorded::capturing ? Refusal::capturing : Refusal::bad_stream;
    }
  }
  std::scoped_lock lock(lock_);
  release(lanes);
  return refusal;
}

// The one context-wide call, for devices without concurrentManagedAccess. Any capture in the context would be destroyed, so
// it is refused while a stream takes part in one that the bridge knows of.
Refusal Pool::synchronize_device() {
  std::vector<std::uint16_t> lanes;
  with_lock([&] {
    lanes_.for_each_stream([&](const Lane& lane) { if (lane.owned) lanes.push_back(lane.index); });
    hold(lanes);
  });
  bool capturing = events_->legacy_is_blocked();
  for (std::uint16_t index : lanes) {
    capturing = capturing || events_->capture_status(lanes_.at(index).stream.handle) != CU_STREAM_CAPTURE_STATUS_NONE;
  }
  with_lock([&] { release(lanes); });
  if (capturing) return Refusal::capturing;
  WithoutGil without(process_);
  return events_->synchronize_device() ? Refusal::none : Refusal::bad_stream;
}

// Takes a whole bin of another lane: one event and one wait serve all its blocks.
bool Pool::steal(const Want& want, const StreamRef& stream, Grant& out) {
  Batch batch;
  Lane* from = nullptr;
  {
    std::scoped_lock lock(lock_);
    lanes_.for_each_stream([&](Lane& lane) {
      drain(lane);
      const bool has = lane.bins.size() > want.size.index && !lane.bins[want.size.index].empty();
      if (from == nullptr && has && lane.index != want.lane) from = &lane;
    });
    if (from == nullptr) return false;
    batch.blocks.swap(from->bins[want.size.index]);
    batch.bytes = batch.blocks.size() * want.size.bytes;
    from->free_bytes -= batch.bytes;
    if (!from->owned) {
      for (const EventRef& event : from->events) batch.waits.push_back({from->index, event, false});
    }
    ++from->users;
    ++lanes_.at(want.lane).users;
  }
  bool ordered = true;
  if (from->owned) {
    EventRef event;
    ordered = events_->record(from->stream, event) == Recorded::done;
    batch.waits.push_back({from->index, std::move(event), false});
  }
  for (const Wait& wait : batch.waits) ordered = ordered && events_->stream_waits(stream, wait.event);
  std::scoped_lock lock(lock_);
  --from->users;
  Lane& mine = lanes_.at(want.lane);
  --mine.users;
  if (!ordered) {
    quarantine(std::move(batch));
    return false;
  }
  if (!mine.owned) {
    // The rest of the bin is as unfinished as before, for everybody but this stream.
    for (const Wait& wait : batch.waits) mine.events.push_back(wait.event);
    ++mine.version;
  }
  auto& bin = mine.bin(want.size.index);
  bin.insert(bin.end(), batch.blocks.begin(), batch.blocks.end());
  mine.free_bytes += batch.bytes;
  return take_idle(want, out);
}

}  // namespace rmm_bridge
