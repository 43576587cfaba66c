// Blocks that device work may still touch, in batches that share what they wait for, and what the quarantine decides about them:
// which events to ask about, on which streams to record one, and which blocks nothing touches any more. Makes no CUDA call and
// knows no driver: whoever holds it asks, marks events as done, and tells. Not thread-safe: the pool's lock covers it.
//
// What a batch waits for is a point in the order of each lane that may have work on it. The points of a lane are one list, oldest
// first, and events of one stream end in order: behind the first one that has not ended, none needs to be asked about.
#pragma once

#include <cstdint>
#include <vector>

#include "streams/lane_table.hpp"

namespace rmm_bridge {

struct Batch {
  std::vector<Block*> blocks;
  std::size_t bytes = 0;
  bool deferred = false;  // CPU blocks that no work is known of: see Pool::flush_deferred
  std::uint64_t number = 0;
  std::size_t point_count = 0;  // that have not ended
};

class Quarantine {
 public:
  struct WaitFor {
    std::uint16_t lane;
    EventRef event;  // null: see Wait
  };

  // An event to ask about: all of one lane stand together, in their order.
  struct Question {
    std::uint16_t lane;
    EventRef event;
  };

  // The number that the next batch gets: what is freed from here on is in a later one.
  std::uint64_t next_number() const noexcept { return next_number_; }

  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t deferred_count() const noexcept { return deferred_count_; }
  bool empty() const noexcept { return batch_count_ == 0; }

  // Takes `blocks` in until all of `waits`, which are not none, have ended. Throws std::bad_alloc and then has changed nothing.
  void add(LaneTable& lanes, std::vector<Block*>&& blocks, std::size_t bytes, const std::vector<WaitFor>& waits,
           bool deferred = false);

  // `event` was recorded on the lane's stream: it stands behind the work of what was freed before batch `later`.
  void sign(Lane& lane, const EventRef& event, std::uint64_t later) noexcept;

  // Appends what to ask about a lane: a few, since more may have ended once those have. True if there are more.
  static bool ask(const Lane& lane, std::vector<Question>& questions);

  // The oldest event that is waited for; null if there is none. Once it is done, `end_points` gets further.
  EventRef oldest(LaneTable& lanes) const noexcept;
  // Whose first point has it.
  const Lane* oldest_lane(LaneTable& lanes) const noexcept;

  // Takes the points at the head of a lane whose events are done off its list. `settle(block)` is called for each block whose
  // batch waited for nothing else. True if a point ended.
  template <typename Settle>
  bool end_points(Lane& lane, Settle settle) {
    bool ended = false;
    while (!lane.points.empty()) {
      const Point point = lane.points.front();
      // One that has no event yet says nothing about those behind it; they are few, and wait with it.
      if (point.event == nullptr || !point.event->done.load(std::memory_order_acquire)) break;
      lane.points.pop_front();
      ended = true;
      if (--point.batch->point_count == 0) leave(point.batch, settle);
    }
    return ended;
  }

 private:
  static constexpr std::size_t kAsked = 64;

  template <typename Settle>
  void leave(Batch* batch, Settle settle) {
    bytes_ -= batch->bytes;
    deferred_count_ -= batch->deferred;
    --batch_count_;
    for (Block* block : batch->blocks) settle(block);
    delete batch;
  }

  std::uint64_t next_number_ = 0;
  std::size_t bytes_ = 0;
  std::size_t batch_count_ = 0;
  std::size_t deferred_count_ = 0;
};

}  // namespace rmm_bridge
