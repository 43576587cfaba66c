// Pool, the part about frees: what a freed block waits for before anybody has it again.
#include "pool/pool.hpp"

namespace rmm_bridge {

void Pool::hold(const std::vector<std::uint16_t>& lanes) noexcept {
  for (std::uint16_t index : lanes) ++lanes_.at(index).users;
}

void Pool::release(const std::vector<std::uint16_t>& lanes) noexcept {
  for (std::uint16_t index : lanes) {
    --lanes_.at(index).users;
    tidy(lanes_.at(index));
  }
}

// A borrowed lane with nothing left in it gives its number back.
void Pool::tidy(Lane& lane) noexcept {
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
void Pool::ended(std::uint16_t index) noexcept {
  if (index < kFirstStreamLane) return;
  drain(lanes_.at(index));
  --lanes_.at(index).live_count;
  tidy(lanes_.at(index));
}

// The lanes whose work may touch the block: first its own and those it was exposed to, `required` of them, then, since
// users forget to tell and unless they chose otherwise, every other one whose stream the bridge holds.
std::vector<std::uint16_t> Pool::lanes_of(std::uint16_t own, const char* ptr, std::size_t& required) {
  std::vector<std::uint16_t> lanes;
  if (own >= kFirstStreamLane) lanes.push_back(own);
  if (auto found = exposures_.find(ptr); found != exposures_.end()) {
    for (std::uint16_t index : found->second) {
      if (index != own) lanes.push_back(index);
    }
  }
  required = lanes.size();
  if (!options_.cautious) return lanes;
  lanes_.for_each_stream([&](const Lane& lane) {
    if (lane.owned && std::find(lanes.begin(), lanes.end(), lane.index) == lanes.end()) lanes.push_back(lane.index);
  });
  return lanes;
}

void Pool::quarantine(Batch&& batch) {
  if (batch.blocks.empty()) return;
  if (batch.waits.empty()) {
    for (Block* block : batch.blocks) settle(block);
    return;
  }
  for (const Wait& wait : batch.waits) ++lanes_.at(wait.lane).live_count;
  batch.number = next_batch_++;
  quarantined_bytes_ += batch.bytes;
  if (batch.fresh) note_fresh_batches(1);
  quarantine_.push_back(std::move(batch));
}

void Pool::deallocate_slowly(const Freeing& freed, bool exposed, const StreamRef* stream) noexcept {
  try {
    free_block(freed, exposed, stream);
  } catch (const std::bad_alloc&) {
    // No memory for our own lists: the block is lost until the pool ends. A leak, never a dangling pointer.
    std::scoped_lock lock(lock_);
    lost_bytes_ += freed.span->block_bytes;
    --live_count_;
  }
}

void Pool::free_block(const Freeing& freed, bool exposed, const StreamRef* stream) {
  const auto& [span, block, asked_bytes] = freed;
  const std::uint16_t own = block->lane.load(std::memory_order_relaxed);
  if (stream != nullptr && stream->host()) stream = nullptr;
  Lane* borrowed = nullptr;
  {
    std::scoped_lock lock(lock_);
    // A CPU block freed on a stream was used there: it may not join that lane, whose blocks are GPU blocks.
    const bool on_stream = stream != nullptr || own >= kFirstStreamLane;
    exposed = exposed || options_.alone || (span->side == Side::cpu && (on_stream || defers_cpu_frees()));
    used_bytes_ -= span->block_bytes;
    asked_bytes_ -= asked_bytes;
    if (driver_ == nullptr || (!exposed && !on_stream)) {
      settle(block);
      ended(own);
    } else if (!exposed) {
      Lane& lane = stream != nullptr ? lanes_.get(*stream) : lanes_.at(own);
      if (lane.owned) {
        put(lane, span, block);
        ended(own);
      } else {
        ++lane.users;
        borrowed = &lane;
      }
    }
  }
  if (borrowed != nullptr && stream != nullptr) {
    free_borrowed(span, block, own, *borrowed, *stream);
  } else if (borrowed != nullptr || (driver_ != nullptr && exposed)) {
    if (borrowed != nullptr) with_lock([&] { --borrowed->users; });
    free_exposed(span, block, own, stream);
  }
  with_lock([&] { --live_count_; });
  if (options_.alone) process_.keeper.wake();
}

// The handle is good only inside this call, so the event is recorded now.
void Pool::free_borrowed(const Span* span, Block* block, std::uint16_t own, Lane& lane, const StreamRef& stream) {
  std::uint64_t version;
  std::uint64_t first_later_batch;
  with_lock([&] {
    version = lane.version;
    first_later_batch = next_batch_;
  });
  EventRef event;
  const Recorded recorded = stream.guessed ? Recorded::capturing : events_->record(stream, event);
  std::scoped_lock lock(lock_);
  --lane.users;
  if (recorded == Recorded::done) {
    // Events of one stream end in order. If nobody else recorded one meanwhile, ours comes after all that are there.
    if (lane.version == version) lane.events.clear();
    ++lane.version;
    lane.events.push_back(event);
    put(lane, span, block);
    sign(lane.index, event, first_later_batch);
  } else {
    Batch batch;
    batch.waits.push_back({lane.index, nullptr, false});
    batch.blocks.push_back(block);
    batch.bytes = span->block_bytes;
    quarantine(std::move(batch));
  }
  ended(own);
}

void Pool::free_exposed(const Span* span, Block* block, std::uint16_t own, const StreamRef* stream) {
  std::vector<std::uint16_t> lanes;
  std::uint16_t given = 0;
  {
    std::scoped_lock lock(lock_);
    std::size_t required;
    lanes = lanes_of(own, block->start, required);
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
    const bool guessed = index == given && stream->guessed;
    if (guessed || events_->record(index == given ? *stream : lane.stream, event) != Recorded::done) event = nullptr;
    batch.waits.push_back({index, std::move(event), false});
  }
  for (EventRef& event : work_of_departed()) batch.waits.push_back({kFreshLane, std::move(event), false});
  batch.blocks.push_back(block);
  batch.bytes = span->block_bytes;
  std::scoped_lock lock(lock_);
  for (std::uint16_t index : unheld) {
    // Work on a borrowed stream that nobody can record an event behind: held until the stream is seen again. The own
    // lane needs none if the caller stated where the last use is ordered.
    if (index != own || stream == nullptr) batch.waits.push_back({index, nullptr, false});
  }
  quarantine(std::move(batch));
  if (auto found = exposures_.find(block->start); found != exposures_.end()) {
    for (std::uint16_t index : found->second) ended(index);
    exposures_.erase(found);
  }
  ended(own);
  release(lanes);  // last: the batch names them now
}

// A stream that is let go may have unfinished work, which counts as long as it is: what a held stream might touch, it might
// have been told to touch before.
std::vector<EventRef> Pool::work_of_departed() {
  std::vector<EventRef> unfinished;
  if (!options_.cautious || departed_count_.load(std::memory_order_relaxed) == 0) return unfinished;
  with_lock([&] { unfinished = departed_; });
  std::vector<EventRef> finished;
  for (const EventRef& event : unfinished) {
    if (events_->finished(event)) finished.push_back(event);
  }
  const auto over = [&](const EventRef& event) { return std::find(finished.begin(), finished.end(), event) != finished.end(); };
  std::erase_if(unfinished, over);
  std::scoped_lock lock(lock_);
  std::erase_if(departed_, over);
  departed_count_.store(departed_.size(), std::memory_order_relaxed);
  return unfinished;
}

// Blocks that only the CPU used are in nobody's order, but a copy out of one that the program started with
// cudaMemcpyDefault, which no library tells of, may still be reading it (docs/design/measured.md). So they wait, many
// together, behind an event on each stream that the bridge holds. While such batches pile up behind a long kernel, each
// is made larger than the one before: they cannot be used any sooner, and looking through them has its cost.
//
// An event on the legacy stream makes blocking streams wait for each other, so it is left out unless blocks are on it.
void Pool::flush_fresh() noexcept {
  if (driver_ == nullptr) return;
  Batch batch;
  batch.fresh = true;
  std::vector<std::uint16_t> lanes;
  bool held = false;
  try {
    {
      std::scoped_lock lock(lock_);
      Lane& fresh = lanes_.at(kFreshLane);
      drain(fresh);
      if (fresh.free_bytes == 0) return;
      lanes_.for_each_stream([&](Lane& lane) {
        drain(lane);
        const bool used = !lane.stream.legacy() || lane.live_count != 0 || lane.free_bytes != 0;
        if (lane.owned && used) lanes.push_back(lane.index);
      });
      std::size_t count = 0;
      for (const auto& bin : fresh.bins) count += bin.size();
      batch.waits.reserve(lanes.size());
      batch.blocks.reserve(count);
      for (auto& bin : fresh.bins) {
        batch.blocks.insert(batch.blocks.end(), bin.begin(), bin.end());
        bin.clear();
      }
      batch.bytes = std::exchange(fresh.free_bytes, 0);
      hold(lanes);
      held = true;
    }
    for (std::uint16_t index : lanes) {
      EventRef event;
      if (events_->record(lanes_.at(index).stream, event) != Recorded::done) event = nullptr;
      batch.waits.push_back({index, std::move(event), false});
    }
    for (EventRef& event : work_of_departed()) batch.waits.push_back({kFreshLane, std::move(event), false});
    std::scoped_lock lock(lock_);
    quarantine(std::move(batch));
    release(lanes);
  } catch (const std::bad_alloc&) {
    if (!held) return;
    std::scoped_lock lock(lock_);
    lost_bytes_ += batch.bytes;  // see `deallocate`
    release(lanes);
  }
}

// A batch of fresh blocks is full: it goes, and what has finished meanwhile comes back.
void Pool::turn_over() noexcept {
  flush_fresh();
  try {
    poll();
  } catch (const std::bad_alloc&) {  // then what has finished is found later
  }
}

void Pool::note_fresh_batches(int change) noexcept {
  fresh_batches_ += change;
  fresh_shift_.store(std::min(fresh_batches_ / 4, 8), std::memory_order_relaxed);
}

}  // namespace rmm_bridge
