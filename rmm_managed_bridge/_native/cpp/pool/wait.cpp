// Pool, the part about waiting for blocks that were freed: the quarantine's ends.
#include "pool/pool.hpp"

namespace rmm_bridge {

EventRef Pool::oldest_event() {
  for (const Batch& batch : quarantine_) {
    for (const Wait& wait : batch.waits) {
      if (!wait.done && wait.event != nullptr) return wait.event;
    }
  }
  return nullptr;
}

bool Pool::wait_for_oldest() {
  if (driver_ == nullptr) return false;
  flush_fresh();
  if (poll()) return true;
  const EventRef event = with_lock([&] { return oldest_event(); });
  if (event == nullptr) return false;
  if (waiting_.fetch_add(1) == 0) waiting_since_ns_.store(steady_time_ns());
  process_.keeper.wake();  // which says so if this takes very long
  bool ended;
  {
    WithoutGil without(process_);
    ended = events_->synchronize(event);
  }
  waiting_.fetch_sub(1);
  if (ended) poll();
  return ended;
}

// At the quarantine's limit: waits for the oldest work there rather than take more memory, though not for ever. Work
// that has outlasted that once is not waited for again. True if `want` could be served.
bool Pool::wait_a_while(const Want& want, Grant& out) {
  if (driver_ == nullptr) return false;
  const auto until = std::chrono::steady_clock::now() + options_.patience;
  for (;;) {
    EventRef event;
    {
      std::scoped_lock lock(lock_);
      if (quarantined_bytes_ <= options_.quarantine_limit_bytes) return false;
      event = oldest_event();
      if (event == nullptr || event == gave_up_on_) return false;
    }
    bool ended;
    {
      WithoutGil without(process_);
      while (!(ended = events_->finished(event)) && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    if (!ended) {
      Notice notice{Notice::Kind::quarantine_full, 0, 0, HolderKey{}, Entry{}};
      with_lock([&] {
        gave_up_on_ = event;
        notice.bytes = quarantined_bytes_;
      });
      process_.notice(notice);
      return false;
    }
    poll();
    if (with_lock([&] { return take_idle(want, out) || take_new(want, out, false); })) return true;
  }
}

// What another thread is just giving back is in no list, and counts as reserved until upstream has it, which may take as long as
// the device does. And another one may have taken what this one made room for, or have added more than it took. So memory has
// only run out if there is none once nobody has any in hand; a second is enough to wait for that. True if `want` could be served.
bool Pool::after_others(const Want& want, Grant& out) {
  return look_until_trimmed([&] {
    return with_lock([&] { return take_idle(want, out) || take_new(want, out, true); }) || grow(want, out);
  });
}

bool Pool::poll() {
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
  // Events of one stream end in order: behind one that has not ended, none has. With batches piled up behind a long kernel
  // that saves asking for each. One that is only recorded now says nothing of those that were recorded before: to skip
  // them would let `wait_for_oldest` wait for the same event for ever.
  std::vector<std::uint64_t> unfinished;
  for (Probe& probe : probes) {
    if (std::find(unfinished.begin(), unfinished.end(), probe.stream.key) != unfinished.end()) continue;
    if (probe.record && events_->record(probe.stream, probe.event) != Recorded::done) probe.event = nullptr;
    probe.finished = probe.event != nullptr && events_->finished(probe.event);
    if (!probe.finished && !probe.record) unfinished.push_back(probe.stream.key);
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
    if (each.fresh) note_fresh_batches(-1);
    for (Block* block : each.blocks) settle(block);
    for (const Wait& wait : each.waits) ended(wait.lane);
    return moved = true;
  });
  for (const Idle& each : idle) {
    Lane& lane = lanes_.at(each.lane);
    if (!lane.in_use || lane.owned || lane.version != each.version) continue;
    moved = moved || lane.free_bytes != 0;
    for (auto& bin : lane.bins) {
      for (Block* block : bin) settle(block);
      bin.clear();
    }
    lane.free_bytes = 0;
    lane.events.clear();
    tidy(lane);
  }
  return moved;
}

}  // namespace rmm_bridge
