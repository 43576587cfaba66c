// Pool, the part about what stream a handle means. Included by pool.hpp.
//
// A stream is known by its id, which unlike the handle never comes back. But to ask for the id of a stream that is being
// captured ends the capture (docs/design/measured.md), and another thread may begin one at any time. So the driver is asked for
// the ids of streams that nobody holds only: the handle of a held one cannot come back while its object is alive.
#pragma once

#include "pool/pool.hpp"

namespace rmm_bridge {

// The held lane that a handle meant on this thread when it was last asked for. An entry may be stale: the front says
// whether the lane is open for that stream. Lanes and pools are never freed.
struct RememberedLane {
  CUstream handle = nullptr;
  std::uint64_t key = 0;
  Lane* lane = nullptr;
};

// Few: each native module has a table, in the little memory that libraries loaded late may use for threads (static TLS). This
// thread's own streams, one in each pool, have places of their own: while one is captured, nothing else tells which it is.
inline RememberedLane& remembered(CUstream handle, const void* home) noexcept {
  static thread_local std::array<RememberedLane, 4 + 2> lanes;
  constexpr std::uint64_t kFibonacci = 0x9E3779B97F4A7C15;  // whose product has good high bits
  if (handle == CU_STREAM_PER_THREAD) return lanes[4 + ((reinterpret_cast<std::uintptr_t>(home) * kFibonacci) >> 63)];
  return lanes[(reinterpret_cast<std::uintptr_t>(handle) * kFibonacci) >> 62];
}

inline void remember(Lane& lane) noexcept {
  remembered(lane.stream.handle, lane.home) = {lane.stream.handle, lane.stream.key, &lane};
}

// The held stream that a handle means, if this thread remembers it.
[[gnu::always_inline]] inline bool Pool::recall(CUstream handle, StreamRef& out) const noexcept {
  const RememberedLane& seen = remembered(handle, &lanes_);
  const bool good = seen.lane != nullptr && seen.handle == handle && seen.lane->home == &lanes_ &&
                    seen.lane->front.key.load(std::memory_order_acquire) == seen.key;
  if (good) [[likely]] out = {seen.key, handle, false, seen.lane};
  return good;
}

// The same, also if it does not; false if nobody holds a stream that has the handle.
[[gnu::noinline]] inline bool Pool::find_held(CUstream handle, StreamRef& out) const noexcept {
  std::scoped_lock lock(lock_);
  if (recall(handle, out)) return true;  // here: another thread may close the lane's front for a moment, and does so under the lock
  Lane* const lane = lanes_.find_held(handle);
  if (lane == nullptr) return false;
  remember(*lane);
  out = {lane->stream.key, handle, false, lane};
  return true;
}

// What stream a handle means now. Refuses a capturing stream before anything else is asked of the driver.
inline Refusal Pool::resolve(CUstream handle, StreamRef& out) const noexcept {
  if (driver_ == nullptr) return Refusal::none;
  if (!process_.running()) return Refusal::bad_stream;
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    out = {StreamRef::kLegacyKey, nullptr};
    recall(nullptr, out);  // for its lane
    return Refusal::none;
  }
  if (handle == CU_STREAM_PER_THREAD) [[unlikely]] return resolve_per_thread(out);
  if (events_->capture_status(handle) != CU_STREAM_CAPTURE_STATUS_NONE) return Refusal::capturing;
  if (recall(handle, out)) [[likely]] return Refusal::none;
  if (!find_held(handle, out)) out = {events_->id_of(handle), handle};
  return out.key == 0 ? Refusal::bad_stream : Refusal::none;
}

// This thread's own stream in the pool's context, which need not be the current one; a thread may have none at all, where
// CUDA's runtime would make it one.
[[gnu::noinline]] inline Refusal Pool::resolve_per_thread(StreamRef& out) const noexcept {
  const DriverScope scope(driver_, events_->context());
  if (events_->capture_status(CU_STREAM_PER_THREAD) != CU_STREAM_CAPTURE_STATUS_NONE) return Refusal::capturing;
  if (!find_held(CU_STREAM_PER_THREAD, out)) out = {events_->id_of(CU_STREAM_PER_THREAD), CU_STREAM_PER_THREAD};
  return out.key == 0 ? Refusal::bad_stream : Refusal::none;
}

// For a free, which must not fail, and for a note that a stream uses a block: both also while it is being captured. One that
// nobody holds is then taken for the stream that was last seen with its handle. That one may be gone and the handle another's:
// then what waits for it waits for ever. False if there is no such stream, or no device that this memory could be used on.
inline bool Pool::resolve_for_free(CUstream handle, StreamRef& out) const noexcept {
  const Refusal refusal = resolve(handle, out);
  if (refusal == Refusal::none) return !out.host();
  if (refusal != Refusal::capturing) return false;
  if (find_held(handle, out)) return true;
  out = {StreamRef::kUnseenKey, handle, true};
  if (handle == CU_STREAM_PER_THREAD) return true;  // of which thread, only its id would tell
  std::uint64_t latest = 0;
  std::scoped_lock lock(lock_);
  lanes_.for_each_stream([&](const Lane& lane) {
    if (lane.stream.handle == handle && lane.stream.key != StreamRef::kUnseenKey) latest = std::max(latest, lane.stream.key);
  });
  if (latest != 0) out.key = latest;
  return true;
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
