// Pool, the part about what stream a handle means.
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
[[gnu::always_inline]] inline bool Pool::recall(CUstream handle, KnownStream& out) const noexcept {
  const RememberedLane& seen = remembered(handle, &lanes_);
  const bool good = seen.lane != nullptr && seen.handle == handle && seen.lane->home == &lanes_ &&
                    seen.lane->front.key.load(std::memory_order_acquire) == seen.key;
  if (good) [[likely]]
    out = {{seen.key, handle}, seen.lane};
  return good;
}

// What stream a handle means now. Refuses a capturing stream before anything else is asked of the driver.
inline Refusal Pool::resolve(CUstream handle, KnownStream& out) const noexcept {
  if (driver_ == nullptr) return Refusal::none;
  if (!acts()) return Refusal::bad_stream;
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    out = {{StreamRef::kLegacyKey, nullptr}};
    recall(nullptr, out);  // for its lane
    return Refusal::none;
  }
  if (handle == CU_STREAM_PER_THREAD) [[unlikely]]
    return resolve_per_thread(out);
  if (events_->capture_status(handle) != CU_STREAM_CAPTURE_STATUS_NONE) return Refusal::capturing;
  if (recall(handle, out)) [[likely]]
    return Refusal::none;
  if (!find_held(handle, out)) out = {{events_->id_of(handle), handle}};
  return out.key == 0 ? Refusal::bad_stream : Refusal::none;
}

}  // namespace rmm_bridge
