// Pool, the part about order: who may have a freed block, and when. Included by pool.hpp.
#pragma once

#include "pool.hpp"

namespace rmm_bridge {

inline void Pool::hold(const std::vector<std::uint16_t>& lanes) noexcept {
  for (std::uint16_t index : lanes) ++lanes_.at(index).users;
}

inline void Pool::release(const std::vector<std::uint16_t>& lanes) noexcept {
  for (std::uint16_t index : lanes) {
    --lanes_.at(index).users;
    tidy(lanes_.at(index));
  }
}

// A borrowed lane with nothing left in it gives its number back.
inline void Pool::tidy(Lane& lane) noexcept {
  // Nobody tells when a thread and its per-thread stream are gone.
  const bool held = lane.owned && lane.stream.handle != CU_STREAM_PER_THREAD;
  if (!lane.in_use || held) return;
  close_front(lane);
  const bool empty = lane.free_bytes == 0 && lane.front.free_bytes == 0 && lane.events.empty();
  if (empty && lane.live_count == 0 && lane.users == 0) {
    lanes_.recycle(lane);
  } else if (lane.owned) {
    lanes_.own(lane);
  }
}

// A live block or a wait no longer names the lane.
inline void Pool::ended(std::uint16_t index) noexcept {
  if (index < kFirstStreamLane) return;
  drain(lanes_.at(index));
  --lanes_.at(index).live_count;
  tidy(lanes_.at(index));
}

// The lanes whose work may touch the block: first its own and those it was exposed to, `required` of them, then, since
// users forget to tell, every other one whose stream the bridge holds.
inline std::vector<std::uint16_t> Pool::lanes_of(std::uint16_t own, const char* ptr, std::size_t& required) {
  std::vector<std::uint16_t> lanes;
  if (own >= kFirstStreamLane) lanes.push_back(own);
  if (auto found = exposures_.find(ptr); found != exposures_.end()) {
    for (std::uint16_t index : found->second) {
      if (index != own) lanes.push_back(index);
    }
  }
  required = lanes.size();
  lanes_.for_each_stream([&](const Lane& lane) {
    if (lane.owned && std::find(lanes.begin(), lanes.end(), lane.index) == lanes.end()) lanes.push_back(lane.index);
  });
  return lanes;
}

inline void Pool::quarantine(Batch&& batch) {
  if (batch.blocks.empty()) return;
  if (batch.waits.empty()) {
    for (char* ptr : batch.blocks) settle(ptr);
    return;
  }
  for (const Wait& wait : batch.waits) ++lanes_.at(wait.lane).live_count;
  batch.number = next_batch_++;
  quarantined_bytes_ += batch.bytes;
  quarantine_.push_back(std::move(batch));
}

inline void Pool::free_block(Span* span, Block* block, char* ptr, bool exposed, const StreamRef* stream) {
  const std::uint16_t own = block->lane.load(std::memory_order_relaxed);
  if (stream != nullptr && stream->host()) stream = nullptr;
  Lane* borrowed = nullptr;
  {
    std::scoped_lock lock(lock_);
    // A CPU block freed on a stream was used there: it may not join that lane, whose blocks are GPU blocks.
    const bool on_stream = stream != nullptr || own >= kFirstStreamLane;
    exposed = exposed || (on_stream && span->side == Side::cpu);
    used_bytes_ -= span->block_bytes;
    if (driver_ == nullptr || (!exposed && !on_stream)) {
      settle(ptr);
      ended(own);
    } else if (!exposed) {
      Lane& lane = stream != nullptr ? lanes_.get(*stream) : lanes_.at(own);
      if (lane.owned) {
        put(lane, span, ptr);
        ended(own);
      } else {
        ++lane.users;
        borrowed = &lane;
      }
    }
  }
  if (borrowed != nullptr && stream != nullptr) {
    free_borrowed(span, ptr, own, *borrowed, *stream);
  } else if (borrowed != nullptr || (driver_ != nullptr && exposed)) {
    if (borrowed != nullptr) with_lock([&] { --borrowed->users; });
    free_exposed(span, ptr, own, stream);
  }
  with_lock([&] { --live_count_; });
}

// The handle is good only inside this call, so the event is recorded now.
inline void Pool::free_borrowed(Span* span, char* ptr, std::uint16_t own, Lane& lane, const StreamRef& stream) {
  std::uint64_t version;
  std::uint64_t first_later_batch;
  with_lock([&] {
    version = lane.version;
    first_later_batch = next_batch_;
  });
  EventRef event;
  const Recorded recorded = events_->record(stream, event);
  std::scoped_lock lock(lock_);
  --lane.users;
  if (recorded == Recorded::done) {
    // Events of one stream end in order. If nobody else recorded one meanwhile, ours comes after all that are there.
    if (lane.version == version) lane.events.clear();
    ++lane.version;
    lane.events.push_back(event);
    put(lane, span, ptr);
    // What was freed during a capture of this stream waited for a sign that it has ended: this is it.
    for (Batch& batch : quarantine_) {
      if (batch.number >= first_later_batch) break;  // its work may have come after the event
      for (Wait& wait : batch.waits) {
        if (wait.lane == lane.index && wait.event == nullptr) wait.event = event;
      }
    }
  } else {
    Batch batch;
    batch.waits.push_back({lane.index, nullptr, false});
    batch.blocks.push_back(ptr);
    batch.bytes = span->block_bytes;
    quarantine(std::move(batch));
  }
  ended(own);
}

inline void Pool::free_exposed(Span* span, char* ptr, std::uint16_t own, const StreamRef* stream) {
  std::vector<std::uint16_t> lanes;
  std::uint16_t given = 0;
  {
    std::scoped_lock lock(lock_);
    std::size_t required;
    lanes = lanes_of(own, ptr, required);
    if (stream != nullptr) {
      given = lanes_.get(*stream).index;
      if (std::find(lanes.begin(), lanes.end(), given) == lanes.end()) lanes.push_back(given);
    }
    hold(lanes);
  }
  Batch batch;
  std::vector<std::uint16_t> unheld;
  for (std::uint16_t index : lanes) {
    const Lane& lane = lanes_.at(index);
    if (!lane.owned && index != given) {
      unheld.push_back(index);
      continue;
    }
    // Where no event can be had now, `poll` tries again once the capture may be over.
    EventRef event;
    if (events_->record(index == given ? *stream : lane.stream, event) != Recorded::done) event = nullptr;
    batch.waits.push_back({index, std::move(event), false});
  }
  batch.blocks.push_back(ptr);
  batch.bytes = span->block_bytes;
  std::scoped_lock lock(lock_);
  for (std::uint16_t index : unheld) {
    // Work on a borrowed stream that nobody can record an event behind: held until the stream is seen again. The own
    // lane needs none if the caller stated where the last use is ordered.
    if (index != own || stream == nullptr) batch.waits.push_back({index, nullptr, false});
  }
  quarantine(std::move(batch));
  if (auto found = exposures_.find(ptr); found != exposures_.end()) {
    for (std::uint16_t index : found->second) ended(index);
    exposures_.erase(found);
  }
  ended(own);
  release(lanes);  // last: the batch names them now
}

// Events behind the work that may touch a live block: on its lanes, and if `cautious` on every lane whose stream is
// held. A lane of the block that takes part in a capture, or whose stream nobody holds, is a refusal; another one is left
// out. `except`: the stream that is to come after the work; what it did itself needs no event.
inline Refusal Pool::events_of(const Block* block, const char* ptr, std::vector<EventRef>& events, bool cautious,
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

// Takes a whole bin of another lane: one event and one wait serve all its blocks.
inline bool Pool::steal(const Want& want, const StreamRef& stream, Grant& out) {
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

inline bool Pool::poll() {
  if (driver_ == nullptr || !process_.running()) return false;
  struct Probe {
    std::uint64_t batch;
    std::size_t wait;
    EventRef event;
    StreamRef stream;
    bool record;
    bool finished;
  };
  struct Idle {
    std::uint16_t lane;
    std::uint64_t version;
    std::vector<EventRef> events;
  };
  std::vector<Probe> probes;
  std::vector<Idle> idle;
  std::vector<std::uint16_t> recording;  // lanes whose handles are used below
  {
    std::scoped_lock lock(lock_);
    for (const Batch& batch : quarantine_) {
      for (std::size_t i = 0; i < batch.waits.size(); ++i) {
        const Wait& wait = batch.waits[i];
        const Lane& lane = lanes_.at(wait.lane);
        if (wait.done || (wait.event == nullptr && !lane.owned)) continue;
        if (wait.event == nullptr) recording.push_back(wait.lane);
        probes.push_back({batch.number, i, wait.event, lane.stream, wait.event == nullptr, false});
      }
    }
    lanes_.for_each_stream([&](const Lane& lane) {
      if (!lane.owned && !lane.events.empty()) idle.push_back({lane.index, lane.version, lane.events});
    });
    hold(recording);
  }
  if (probes.empty() && idle.empty()) return false;
  for (Probe& probe : probes) {
    if (probe.record && events_->record(probe.stream, probe.event) != Recorded::done) probe.event = nullptr;
    probe.finished = probe.event != nullptr && events_->finished(probe.event);
  }
  std::erase_if(idle, [&](const Idle& lane) {
    return !std::all_of(lane.events.begin(), lane.events.end(), [&](auto& e) { return events_->finished(e); });
  });

  std::scoped_lock lock(lock_);
  release(recording);
  bool moved = false;
  auto batch = quarantine_.begin();
  for (const Probe& probe : probes) {
    while (batch != quarantine_.end() && batch->number < probe.batch) ++batch;
    if (batch == quarantine_.end()) break;
    if (batch->number != probe.batch) continue;  // another thread finished it
    Wait& wait = batch->waits[probe.wait];
    wait.done = wait.done || probe.finished;
    if (wait.event == nullptr) wait.event = probe.event;
  }
  std::erase_if(quarantine_, [&](const Batch& each) {
    if (!std::all_of(each.waits.begin(), each.waits.end(), [](const Wait& wait) { return wait.done; })) return false;
    quarantined_bytes_ -= each.bytes;
    for (char* ptr : each.blocks) settle(ptr);
    for (const Wait& wait : each.waits) ended(wait.lane);
    return moved = true;
  });
  for (const Idle& each : idle) {
    Lane& lane = lanes_.at(each.lane);
    if (!lane.in_use || lane.owned || lane.version != each.version) continue;
    moved = moved || lane.free_bytes != 0;
    for (auto& bin : lane.bins) {
      for (char* ptr : bin) settle(ptr);
      bin.clear();
    }
    lane.free_bytes = 0;
    lane.events.clear();
    tidy(lane);
  }
  return moved;
}

}  // namespace rmm_bridge
