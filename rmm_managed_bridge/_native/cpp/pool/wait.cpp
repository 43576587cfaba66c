// Pool, the part about waiting for blocks that were freed: the quarantine's ends.
#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

#include "pool/pool.hpp"

namespace rmm_bridge {

bool Pool::wait_for_oldest() {
  if (driver_ == nullptr) return false;
  flush_deferred();
  if (poll()) return true;
  const EventRef event = with_lock([&] { return quarantine_.oldest(lanes_); });
  if (event == nullptr) return false;
  bool ended;
  {
    WithoutGil without(process_);
    ended = events_->synchronize(event);
  }
  if (ended) poll();
  return ended;
}

// The driver has no wait with an end, so it is asked: at once again at first, since most work ends soon, and later once a millisecond.
Pool::Waited Pool::wait_for_progress() {
  using std::chrono::steady_clock;
  constexpr std::chrono::microseconds kLongest{1000};
  constexpr std::chrono::seconds kVeryLong{10};
  constexpr int kTurns = 64;  // between two looks at what is not the oldest
  if (driver_ == nullptr) return Waited::nothing;
  flush_deferred();
  if (poll()) return Waited::progress;
  const auto begun = steady_clock::now();
  std::chrono::microseconds pause{20};
  bool said = false;
  WithoutGil without(process_);
  for (int turn = 1;; ++turn) {
    const EventRef event = with_lock([&] { return quarantine_.oldest(lanes_); });
    if (event == nullptr) return Waited::nothing;
    const Ended ended = events_->look(event);
    if (ended == Ended::unknown) return Waited::nothing;
    if (ended == Ended::yes || turn % kTurns == 0) {
      if (poll() || ended == Ended::yes) return Waited::progress;
    }
    const auto waited = steady_clock::now() - begun;
    if (waited >= options_.wait_timeout) {
      note_stalled();
      return Waited::timed_out;
    }
    // Straight to the terminal: the thread that waits may be the only one that could show a warning.
    if (waited >= kVeryLong && !std::exchange(said, true)) {
      std::fputs(
          "rmm_managed_bridge: an allocation has waited for 10 s: the pool has reached its limit, and no device work that freed "
          "memory waits for has ended meanwhile; look for a kernel that hangs, or raise maximum_pool_size\n",
          stderr);
    }
    if (turn < kTurns) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(pause);
    if (turn % 8 == 0) pause = std::min(2 * pause, kLongest);
  }
}

void Pool::note_stalled() {
  std::scoped_lock lock(lock_);
  if (const Lane* lane = quarantine_.oldest_lane(lanes_); lane != nullptr) {
    const Batch& batch = *lane->points.front().batch;
    stalled_ = {lane->stream.handle, batch.blocks.front()->start, batch.bytes};
  }
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
      if (quarantine_.bytes() <= options_.quarantine_limit_bytes) return false;
      event = quarantine_.oldest(lanes_);
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
      PendingWarning warning{PendingWarning::Kind::quarantine_full, 0, 0, HolderKey{}, Entry{}};
      with_lock([&] {
        gave_up_on_ = event;
        warning.bytes = quarantine_.bytes();
      });
      process_.warn(warning);
      return false;
    }
    poll();
    if (with_lock([&] { return take_idle(want, out) || take_new(want, out, false); })) return true;
  }
}

void Pool::pause(int turn) const noexcept {
  WithoutGil without(process_);
  std::this_thread::sleep_for(
      std::min(std::chrono::microseconds(50) * (1 << std::min(turn, 10)), std::chrono::microseconds(10'000)));
}

// Whether the limit leaves room for it beside what is live.
bool Pool::fits(const Want& want) noexcept {
  std::scoped_lock lock(lock_);
  drain_all();
  return want.size.bytes <= options_.limit_bytes - std::min(options_.limit_bytes, used_bytes_);
}

// What another thread has in hand is in no list, and counts as reserved until upstream has it, which may take as long as the device
// does; and what it asks upstream for counts before it is there. So a request is refused only after a look in which nobody had
// anything in hand, from the beginning of the look to its end: docs/design/pool.md has the proof. Not for ever: threads that free all
// the time always have something in hand, and an upstream in Python that allocates in its own calls would wait for itself.
Refusal Pool::look_last(const Want& want, Grant& out) {
  const auto idle = [&] { return with_lock([&] { return take_idle(want, out) || take_new(want, out, true); }); };
  const auto until = std::chrono::steady_clock::now() + options_.patience;
  for (int pauses = 0;;) {
    const std::uint64_t begun = hands_begun_.load();  // before: who begins between the two is seen by one of them
    bool others = hands_.load() != 0;
    const auto again = [&] {
      return (others || hands_begun_.load() != begun) && std::chrono::steady_clock::now() < until && fits(want);
    };
    if (idle() || grow(want, out, &others)) return Refusal::none;
    if (!again()) {
      // Last, what other work still holds.
      const Waited waited = wait_for_progress();
      if (waited == Waited::timed_out) return Refusal::timed_out;
      if (idle() || (trim() != 0 && grow(want, out, &others))) return Refusal::none;
      if (waited == Waited::progress) continue;
      // Also what this thread has moved meanwhile, by the wait or the trim, is looked for once more.
      if (!again()) return Refusal::out_of_memory;
    }
    pause(pauses++);
  }
}

bool Pool::poll() {
  if (driver_ == nullptr || !acts()) return false;
  bool moved = false;
  while (poll_once(moved)) {
  }
  return moved;
}

// True if another look is worth it: of some lane there was more to ask than is asked at once.
bool Pool::poll_once(bool& moved) {
  std::vector<Quarantine::Question> ordered, others;  // of one lane, in the order in which they end; in no order
  Pins recording(*this);                              // whose handles are used below
  std::uint64_t later = 0;
  bool more = false;
  {
    std::scoped_lock lock(lock_);
    later = quarantine_.next_number();
    lanes_.for_each_stream([&](Lane& lane) {
      if (lane.unrecorded_count != 0 && lane.held()) recording.add(lane);
      more = Quarantine::ask(lane, ordered) || more;
      if (lane.departure != nullptr) ordered.push_back({lane.index, lane.departure});
      for (const EventRef& event : lane.events) others.push_back({lane.index, event});
    });
  }
  if ((ordered.empty() && others.empty() && recording.empty()) || in_host_function()) return false;
  // With points piled up behind a long kernel, this asks once for each lane.
  std::uint16_t unfinished = 0;
  for (const Quarantine::Question& each : ordered) {
    if (each.lane != unfinished && !events_->finished(each.event)) unfinished = each.lane;
  }
  for (const Quarantine::Question& each : others) events_->finished(each.event);
  std::vector<Quarantine::WaitFor> signs;
  if (!recording.empty() && !KeepGil::kept()) {
    const WithoutGil without(process_);
    for (const std::uint16_t index : recording) {
      EventRef event;
      if (events_->record(lanes_.at(index).stream, event) != Recorded::done) continue;
      events_->finished(event);
      signs.push_back({index, std::move(event)});
    }
  }

  std::scoped_lock lock(lock_);
  sign_all(signs, later);
  bool ended = false;
  lanes_.for_each_stream([&](Lane& lane) {
    const bool changed = quarantine_.end_points(lane, [&](Block* block) { settle(block); });
    ended = ended || changed;
    const bool over =
        std::all_of(lane.events.begin(), lane.events.end(), [](const EventRef& event) { return event->done.load(); });
    if (!lane.events.empty() && over) {
      moved = moved || lane.free_bytes != 0;
      for (auto& bin : lane.bins) {
        for (Block* block : bin) settle(block);
        bin.clear();
      }
      lane.free_bytes = 0;
      lane.events.clear();
    }
    if (changed || !lane.held()) leave(lane);
  });
  grow_deferred();
  moved = moved || ended;
  return more && ended;
}

}  // namespace rmm_bridge
