// Pool, the part about frees: what a freed block waits for before anybody has it again.
#include <algorithm>
#include <optional>
#include <utility>

#include "pool/front.hpp"

namespace rmm_bridge {

using WaitFor = Quarantine::WaitFor;

// The one way out of a lane's life: a number that nothing names any more may stand for another stream.
void Pool::leave(Lane& lane) noexcept {
  // Nobody tells when a thread and its per-thread stream are gone, so that lane goes whenever it is empty.
  const bool kept = lane.held() && !lane.stream.per_thread();
  if (!lane.in_use() || kept) return;
  close_front(lane);
  if (lane.departure != nullptr && lane.departure->done.load(std::memory_order_acquire)) lanes_.forget_departure(lane);
  const bool empty = lane.free_bytes == 0 && lane.front.free_bytes == 0 && lane.events.empty() && lane.points.empty();
  if (empty && lane.named_count == 0 && lane.pins == 0 && lane.departure == nullptr) {
    lanes_.recycle(lane);
  } else if (lane.held()) {
    lanes_.open_front(lane);
  }
}

// A live block, or a use of one, no longer names the lane.
void Pool::unname(std::uint16_t index) noexcept {
  if (index < kFirstStreamLane) return;
  Lane& lane = lanes_.at(index);
  drain(lane);
  --lane.named_count;
  leave(lane);
}

Pool::Ending::~Ending() {
  std::scoped_lock lock(pool.lock_);
  for (const std::uint16_t index : uses) pool.unname(index);
  pool.unname(lane);
  --pool.live_count_;  // last: `close` goes on once it is zero
}

std::vector<std::uint16_t> Pool::take_uses(const char* ptr) noexcept {
  std::vector<std::uint16_t> uses;
  if (auto found = stream_uses_.find(ptr); found != stream_uses_.end()) {
    uses.swap(found->second);
    stream_uses_.erase(found);
  }
  return uses;
}

// Pins the lanes whose work may touch a block: first its own and those of its stream uses, whose number is returned, then, since
// users forget to tell, and if `cautious`, every other one whose stream is held.
std::size_t Pool::pin_lanes_of(std::uint16_t own, const std::vector<std::uint16_t>& uses, bool cautious, Pins& pins) {
  if (own >= kFirstStreamLane) pins.add(lanes_.at(own));
  for (const std::uint16_t index : uses) pins.add(lanes_.at(index));
  const std::size_t required = pins.size();
  if (cautious) {
    lanes_.for_each_stream([&](Lane& lane) {
      if (lane.held()) pins.add(lane);
    });
  }
  return required;
}

// A stream that was let go may have unfinished work, which counts as long as it is: what a held stream might touch, it might have
// been told to touch before.
void Pool::pin_departures(Pins& pins, std::vector<WaitFor>& waits) {
  lanes_.for_each_stream([&](Lane& lane) {
    if (lane.departure == nullptr || lane.departure->done.load(std::memory_order_acquire)) return;
    pins.add(lane);
    waits.push_back({lane.index, lane.departure});
  });
}

void Pool::quarantine(std::vector<Block*>&& blocks, std::size_t bytes, const std::vector<WaitFor>& waits, bool deferred) {
  if (blocks.empty()) return;
  if (waits.empty()) {
    for (Block* block : blocks) settle(block);
    return;
  }
  quarantine_.add(lanes_, std::move(blocks), bytes, waits, deferred);
  if (deferred) grow_deferred();
}

// Events that were recorded since `later` was the next batch stand behind the work of all that was freed before, too.
void Pool::sign_all(std::span<const WaitFor> recorded, std::uint64_t later) noexcept {
  for (const WaitFor& each : recorded) {
    if (each.event == nullptr) continue;
    lanes_.note_capture(lanes_.at(each.lane), 0);  // it is over
    quarantine_.sign(lanes_.at(each.lane), each.event, later);
  }
}

void Pool::deallocate_slowly(const Freeing& freed, bool shown, const StreamRef* stream) noexcept {
  {
    Ending ending{*this, freed.block->lane.load(std::memory_order_relaxed), {}};
    try {
      free_block(freed, shown, stream != nullptr && stream->host() ? nullptr : stream, ending);
    } catch (const std::bad_alloc&) {
      // No memory for our own lists: the block is lost until the pool ends. A leak, never a dangling pointer.
      std::scoped_lock lock(lock_);
      lost_bytes_ += freed.span->block_bytes;
    }
  }
  if (options_.debug) process_.background.wake();
  process_.background.begin_again();
}

void Pool::free_block(const Freeing& freed, bool shown, const StreamRef* stream, Ending& ending) {
  const auto& [span, block, asked_bytes, born_ns] = freed;
  const std::uint16_t own = ending.lane;
  Pins pins(*this);
  Lane* borrowed = nullptr;
  {
    std::scoped_lock lock(lock_);
    // A CPU block freed on a stream was used there: it may not join that lane, whose blocks are GPU blocks.
    const bool on_stream = stream != nullptr || own >= kFirstStreamLane;
    shown = shown || options_.debug || (span->side == Side::cpu && (on_stream || defers_cpu_frees()));
    used_bytes_ -= span->block_bytes;
    asked_bytes_ -= asked_bytes;
    ending.uses = take_uses(block->start);
    if (driver_ == nullptr || (!shown && !on_stream)) {
      settle(block);
      return;
    }
    if (!shown) {
      Lane& lane = stream != nullptr ? lanes_.get(*stream) : lanes_.at(own);
      if (lane.held()) {
        put(lane, span, block);
        return;
      }
      if (stream != nullptr) {
        pins.add(lane);
        borrowed = &lane;
      }
    }
  }
  if (borrowed != nullptr) {
    free_borrowed(span, block, *borrowed, *stream);
  } else {
    free_shown(freed, stream, ending);
  }
}

// The handle is good only inside this call, so the event is recorded now.
void Pool::free_borrowed(const Span* span, Block* block, Lane& lane, const StreamRef& stream) {
  std::vector<EventRef> before;
  std::uint64_t later = 0;
  with_lock([&] {
    before = lane.events;
    later = quarantine_.next_number();
  });
  EventRef event;
  const WithoutGil without(process_);
  const Recorded recorded = stream.guessed || KeepGil::kept() ? Recorded::capturing : events_->record(stream, event);
  std::scoped_lock lock(lock_);
  if (recorded != Recorded::done) {
    quarantine({block}, span->block_bytes, {{lane.index, nullptr}});
    return;
  }
  quarantine_.sign(lane, event, later);
  if (lane.held()) {
    // Since the event was recorded: with it, the lane would count as finished though it has blocks of later work.
    put(lane, span, block);
    return;
  }
  lane.events.push_back(event);
  try {
    put(lane, span, block);
  } catch (...) {
    lane.events.pop_back();
    throw;
  }
  // Ours was recorded after those that were there, and stands behind them. Others that came meanwhile may stand behind ours.
  std::erase_if(lane.events, [&](const EventRef& each) { return std::find(before.begin(), before.end(), each) != before.end(); });
}

// A captured stream does nothing until its capture is over, but what it was told before goes on, and no event can be had behind that.
// So blocks wait for the end of the capture. Not such as were made since: what a stream did before cannot touch them, and nobody told
// that the capture would.
void Pool::free_shown(const Freeing& freed, const StreamRef* stream, const Ending& ending) {
  Pins pins(*this), departed(*this);
  std::vector<WaitFor> waits;
  std::uint16_t given = 0;
  std::uint64_t later = 0;
  std::size_t required = 0;
  {
    std::scoped_lock lock(lock_);
    required = pin_lanes_of(ending.lane, ending.uses, options_.cautious, pins);
    if (stream != nullptr) {
      Lane& lane = lanes_.get(*stream);
      pins.add(lane);
      given = lane.index;
    }
    if (options_.cautious) pin_departures(departed, waits);
    later = quarantine_.next_number();
  }
  const auto first = static_cast<std::ptrdiff_t>(waits.size());
  std::optional<bool> may_record;  // asked once there is an event to record
  const auto record = [&](const StreamRef& on, EventRef& event) {
    if (!may_record) may_record = !must_not_wait();
    return *may_record ? events_->record(on, event) : Recorded::failed;
  };
  struct Captured {
    std::uint16_t lane;
    std::uint64_t capture;
    bool must;
  };
  std::vector<Captured> captured;
  const WithoutGil without(process_);
  std::size_t position = 0;
  for (const std::uint16_t index : pins) {
    const bool must = position++ < required || index == given;
    const Lane& lane = lanes_.at(index);
    EventRef event;
    if (index == given) {
      if (!stream->guessed) record(*stream, event);
    } else if (lane.held()) {
      // Where no event can be had now, `poll` tries again once the capture or the host function may be over.
      if (record(lane.stream, event) == Recorded::capturing) {
        if (const std::uint64_t capture = events_->capture_of(lane.stream); capture != 0)
          captured.push_back({index, capture, must});
      }
    } else if (index == ending.lane && stream != nullptr) {
      continue;  // the caller stated where the last use is ordered
    }
    // Without an event on a lane that is not held: work that nobody can record one behind, until the stream is seen again.
    waits.push_back({index, std::move(event)});
  }
  std::scoped_lock lock(lock_);
  for (const Captured& each : captured) {
    Lane& lane = lanes_.at(each.lane);
    const bool younger = lanes_.is_younger(lane, each.capture, freed.born_ns);
    lanes_.note_capture(lane, each.capture);
    if (younger && !each.must) {
      waits.erase(std::remove_if(waits.begin() + first, waits.end(), [&](const WaitFor& wait) { return wait.lane == each.lane; }),
                  waits.end());
    }
  }
  sign_all({waits.begin() + first, waits.end()}, later);
  quarantine({freed.block}, freed.span->block_bytes, waits);
}

// Blocks that only the CPU used are in nobody's order, but a copy out of one that the program started with
// cudaMemcpyDefault, which no library tells of, may still be reading it (docs/design/measured.md). So they wait, many
// together, behind an event on each stream that the bridge holds. While such batches pile up behind a long kernel, each
// is made larger than the one before: they cannot be used any sooner, and looking through them has its cost.
//
// An event on the legacy stream makes blocking streams wait for each other, so it is left out unless blocks are on it.
void Pool::flush_deferred() noexcept {
  if (driver_ == nullptr) return;
  InHand in_hand(*this);
  Pins pins(*this), departed(*this);
  std::vector<WaitFor> waits;
  std::vector<Block*> blocks;
  std::size_t bytes = 0;
  std::uint64_t later = 0;
  try {
    {
      std::scoped_lock lock(lock_);
      Lane& deferred = lanes_.at(kDeferredLane);
      drain(deferred);
      if (deferred.free_bytes == 0) return;
      lanes_.for_each_stream([&](Lane& lane) {
        drain(lane);
        const bool used = !lane.stream.legacy() || lane.named_count != 0 || !lane.points.empty() || lane.free_bytes != 0;
        if (lane.held() && used) pins.add(lane);
      });
      if (options_.cautious) pin_departures(departed, waits);
      waits.reserve(waits.size() + pins.size());
      bytes = deferred.empty_into(blocks);
      deferred.front.begin_batch();
      in_hand.begin();
      later = quarantine_.next_number();
    }
    const auto first = static_cast<std::ptrdiff_t>(waits.size());
    const WithoutGil without(process_);
    std::vector<std::pair<std::uint16_t, std::uint64_t>> captured;
    for (const std::uint16_t index : pins) {
      EventRef event;
      const StreamRef& stream = lanes_.at(index).stream;
      if (events_->record(stream, event) == Recorded::capturing) captured.emplace_back(index, events_->capture_of(stream));
      waits.push_back({index, std::move(event)});
    }
    std::scoped_lock lock(lock_);
    for (const auto& [index, capture] : captured) {
      if (capture != 0) lanes_.note_capture(lanes_.at(index), capture);
    }
    sign_all({waits.begin() + first, waits.end()}, later);
    quarantine(std::move(blocks), bytes, waits, true);
  } catch (const std::bad_alloc&) {
    std::scoped_lock lock(lock_);
    lost_bytes_ += bytes;  // see `deallocate_slowly`
  }
}

// A deferred batch is full: it goes, and what has finished meanwhile comes back. Where nothing may be waited for it grows instead, and
// the next free elsewhere finds it.
void Pool::turn_over() noexcept {
  if (must_not_wait()) return;
  flush_deferred();
  try {
    poll();
  } catch (const std::bad_alloc&) {  // then what has finished is found later
  }
}

void Pool::grow_deferred() noexcept {
  const auto count = static_cast<int>(std::min<std::size_t>(quarantine_.deferred_count(), 32));
  deferred_shift_.store(count / 4, std::memory_order_relaxed);
}

}  // namespace rmm_bridge
