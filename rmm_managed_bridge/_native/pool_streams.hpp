// Pool, the part about what stream a handle means. Included by pool.hpp.
//
// A stream is known by its id, which unlike the handle never comes back. But to ask for the id of a stream that is being
// captured ends the capture (docs/design/measured.md), and another thread may begin one at any time. So the driver is asked for
// the ids of streams that nobody holds only: the handle of a held one cannot come back while its object is alive.
#pragma once

#include "pool.hpp"

namespace rmm_bridge {

// The held lane that a handle meant on this thread when it was last asked for. An entry may be stale: the front says
// whether the lane is open for that stream. Lanes and pools are never freed.
struct RememberedLane {
  CUstream handle = nullptr;
  std::uint64_t key = 0;
  Lane* lane = nullptr;
};

inline RememberedLane& remembered(CUstream handle) noexcept {
  // Small: each native module has one, in the little memory that libraries loaded late may use for threads (static TLS).
  static thread_local std::array<RememberedLane, 4> lanes;
  return lanes[(reinterpret_cast<std::uintptr_t>(handle) * 0x9E3779B97F4A7C15) >> 62];  // Fibonacci hashing
}

inline void remember(Lane& lane) noexcept { remembered(lane.stream.handle) = {lane.stream.handle, lane.stream.key, &lane}; }

inline const RememberedLane* Pool::held_lane(CUstream handle) const noexcept {
  const RememberedLane& seen = remembered(handle);
  const bool good = seen.lane != nullptr && seen.handle == handle && seen.lane->home == &lanes_ &&
                    seen.lane->front.key.load(std::memory_order_acquire) == seen.key;
  return good ? &seen : nullptr;
}

// What stream a handle means now. Refuses a capturing stream before anything else is asked of the driver.
inline Refusal Pool::resolve(CUstream handle, StreamRef& out) const noexcept {
  if (driver_ == nullptr) return Refusal::none;
  if (!process_.running()) return Refusal::bad_stream;
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    out = {StreamRef::kLegacyKey, nullptr};
    return Refusal::none;
  }
  if (events_->capture_status(handle) != CU_STREAM_CAPTURE_STATUS_NONE) return Refusal::capturing;
  if (const RememberedLane* seen = held_lane(handle)) [[likely]] {
    out = {seen->key, handle};
    return Refusal::none;
  }
  std::uint64_t key = key_by_handle(handle, true);
  if (key == 0) {
    // A thread without a current context has no per-thread stream for the driver, though CUDA's runtime would give it one.
    const DriverScope scope(handle == CU_STREAM_PER_THREAD ? driver_ : nullptr, events_->context());
    key = events_->id_of(handle);
  }
  if (key == 0) return Refusal::bad_stream;
  out = {key, handle};
  return Refusal::none;
}

// For a free, which must not fail, and for a note that a stream uses a block: both also while it is being captured, when it is
// the stream that was last seen with this handle, or one of kUnseenKey. False if there is no such stream, or no device
// that this memory could be used on.
inline bool Pool::resolve_for_free(CUstream handle, StreamRef& out) const noexcept {
  const Refusal refusal = resolve(handle, out);
  if (refusal == Refusal::none) return !out.host();
  if (refusal != Refusal::capturing) return false;
  const RememberedLane* seen = held_lane(handle);
  const std::uint64_t key = seen != nullptr ? seen->key : key_by_handle(handle, false);
  out = {key != 0 ? key : StreamRef::kUnseenKey, handle};
  return true;
}

// The id of the stream that has this handle, without asking the driver: of the one that is held, or else, unless `held`, of the
// one that was seen last. That one may be gone and the handle another's: then what waits for it waits for ever. 0 if there
// is none, and for the handle that each thread has.
inline std::uint64_t Pool::key_by_handle(CUstream handle, bool held) const noexcept {
  if (handle == CU_STREAM_PER_THREAD) return 0;
  std::uint64_t owned = 0, latest = 0;
  std::scoped_lock lock(lock_);
  lanes_.for_each_stream([&](Lane& lane) {
    if (lane.stream.handle != handle || lane.stream.key == StreamRef::kUnseenKey) return;
    latest = std::max(latest, lane.stream.key);
    if (!lane.owned) return;
    owned = lane.stream.key;
    remember(lane);
  });
  return owned != 0 || held ? owned : latest;
}

// A borrowed stream passes its handle again: now an event can be recorded behind what was freed without one, because the stream
// was being captured, or because whoever freed it could not vouch for the handle.
inline void Pool::seen_again(std::uint16_t lane, const StreamRef& stream) {
  const auto waits = [&](const Wait& wait) { return wait.lane == lane && wait.event == nullptr; };
  std::uint64_t later = 0;
  const bool awaited = with_lock([&] {
    later = next_batch_;
    return std::any_of(quarantine_.begin(), quarantine_.end(), [&](const Batch& batch) {
      return std::any_of(batch.waits.begin(), batch.waits.end(), waits);
    });
  });
  EventRef event;
  if (awaited && events_->record(stream, event) == Recorded::done) with_lock([&] { sign(lane, event, later); });
}

// `event` was recorded on the lane's stream: it stands behind the work of what was freed before batch `later`.
inline void Pool::sign(std::uint16_t lane, const EventRef& event, std::uint64_t later) noexcept {
  for (Batch& batch : quarantine_) {
    if (batch.number >= later) break;
    for (Wait& wait : batch.waits) {
      if (wait.lane == lane && wait.event == nullptr) wait.event = event;
    }
  }
}

}  // namespace rmm_bridge
