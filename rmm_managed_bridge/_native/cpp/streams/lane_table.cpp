#include "streams/lane_table.hpp"

#include <limits>
#include <utility>

namespace rmm_bridge {

using State = Lane::State;

LaneTable::LaneTable(bool fronts) {
  for (std::uint16_t index = 0; index < kFirstStreamLane; ++index) {
    Lane& lane = add();
    if (fronts) lane.front.key.store(StreamRef::kHostKey);
  }
}

Lane* LaneTable::find(std::uint64_t key) noexcept {
  if (key == last_key_) return &at(last_index_);
  auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  last_key_ = key;
  last_index_ = found->second;
  return &at(found->second);
}

Lane& LaneTable::get(const StreamRef& stream) {
  if (Lane* lane = find(stream.key); lane != nullptr) {
    if (lane->state.load(std::memory_order_relaxed) != State::closing) return *lane;
    // Its object was let go while the program kept the stream. What was before stays before: the departure is waited for.
    if (lane->departure != nullptr) lane->events.push_back(lane->departure);
    lane->stream = stream;
    lane->state.store(State::borrowed, std::memory_order_relaxed);
    return *lane;
  }
  if (idle_.empty()) {
    if (count_ > std::numeric_limits<std::uint16_t>::max()) throw std::bad_alloc();
    idle_.reserve(count_ + 1);  // `recycle` needs no memory
    idle_.push_back(add().index);
  }
  const std::uint16_t index = idle_.back();
  by_key_.emplace(stream.key, index);  // the last thing that can fail: the lane stays idle then
  idle_.pop_back();
  Lane& lane = at(index);
  lane.stream = stream;
  lane.state.store(State::borrowed, std::memory_order_relaxed);
  // These two outlive every block: nobody destroys them.
  if (stream.legacy() || (stream.per_thread() && stream.key != StreamRef::kUnseenKey)) hold(lane);
  return lane;
}

void LaneTable::hold(Lane& lane) noexcept {
  if (!lane.held()) working_count_.fetch_add(1, std::memory_order_relaxed);
  lane.state.store(State::held, std::memory_order_relaxed);
  lane.events.clear();  // one that is recorded later stands behind the same work
  if (!lane.stream.legacy() && !lane.stream.per_thread()) {
    try {
      by_handle_.insert_or_assign(lane.stream.handle, lane.index);
    } catch (const std::bad_alloc&) {  // then the driver is asked for its id
    }
  }
  open_front(lane);
}

void LaneTable::open_front(Lane& lane) noexcept {
  std::scoped_lock lock(lane.front.lock);
  lane.front.key.store(lane.stream.key, std::memory_order_release);
}

void* LaneTable::let_go(Lane& lane, EventRef departure) noexcept {
  note_capture(lane, 0);
  forget_departure(lane);  // the new one stands behind it
  if (departure != nullptr) working_count_.fetch_add(1, std::memory_order_relaxed);
  lane.departure = std::move(departure);
  unhold(lane);
  lane.state.store(State::closing, std::memory_order_relaxed);
  return std::exchange(lane.owner, nullptr);
}

void LaneTable::unhold(Lane& lane) noexcept {
  if (!lane.held()) return;
  working_count_.fetch_sub(1, std::memory_order_relaxed);
  if (find_held(lane.stream.handle) == &lane) by_handle_.erase(lane.stream.handle);
}

void LaneTable::recycle(Lane& lane) noexcept {
  if (last_index_ == lane.index) last_key_ = StreamRef::kHostKey;
  by_key_.erase(lane.stream.key);
  unhold(lane);
  note_capture(lane, 0);
  lane.owner = nullptr;
  lane.state.store(State::idle, std::memory_order_relaxed);
  forget_departure(lane);
  lane.events.clear();
  for (auto& bin : lane.bins) bin.clear();
  lane.free_bytes = 0;
  idle_.push_back(lane.index);
}

Lane& LaneTable::add() {
  if (count_ % kChunk == 0) chunks_[count_ / kChunk].store(new Lane[kChunk], std::memory_order_release);
  Lane& lane = at(static_cast<std::uint16_t>(count_));
  lane.index = static_cast<std::uint16_t>(count_++);
  lane.home = this;
  return lane;
}

}  // namespace rmm_bridge
