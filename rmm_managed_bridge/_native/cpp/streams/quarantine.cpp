#include "streams/quarantine.hpp"

#include <algorithm>
#include <list>
#include <memory>
#include <utility>

namespace rmm_bridge {

void Quarantine::add(LaneTable& lanes, std::vector<Block*>&& blocks, std::size_t bytes, const std::vector<WaitFor>& waits,
                     bool deferred) {
  auto batch = std::make_unique<Batch>();
  std::list<Point> points;
  for (const WaitFor& wait : waits) points.push_back({batch.get(), wait.event});
  // Nothing below can fail.
  batch->blocks = std::move(blocks);
  batch->bytes = bytes;
  batch->deferred = deferred;
  batch->number = next_number_++;
  batch->point_count = waits.size();
  for (const WaitFor& wait : waits) {
    Lane& lane = lanes.at(wait.lane);
    if (wait.event == nullptr) ++lane.unrecorded_count;
    lane.points.splice(lane.points.end(), points, points.begin());
  }
  bytes_ += bytes;
  deferred_count_ += deferred;
  ++batch_count_;
  batch.release();
}

void Quarantine::sign(Lane& lane, const EventRef& event, std::uint64_t later) noexcept {
  if (lane.unrecorded_count == 0) return;
  for (Point& point : lane.points) {
    if (point.batch->number >= later) break;
    if (point.event != nullptr) continue;
    point.event = event;
    --lane.unrecorded_count;
  }
}

bool Quarantine::ask(const Lane& lane, std::vector<Question>& questions) {
  std::size_t count = 0;
  for (const Point& point : lane.points) {
    if (point.event == nullptr) break;
    if (count == kAsked) return true;
    questions.push_back({lane.index, point.event});
    ++count;
  }
  return false;
}

EventRef Quarantine::oldest(LaneTable& lanes) const noexcept {
  const Lane* lane = oldest_lane(lanes);
  return lane == nullptr ? nullptr : lane->points.front().event;
}

const Lane* Quarantine::oldest_lane(LaneTable& lanes) const noexcept {
  const Lane* found = nullptr;
  std::uint64_t number = next_number_;
  lanes.for_each_stream([&](const Lane& lane) {
    if (lane.points.empty()) return;
    const Point& head = lane.points.front();
    if (head.event == nullptr || head.batch->number >= number) return;
    number = head.batch->number;
    found = &lane;
  });
  return found;
}

}  // namespace rmm_bridge
