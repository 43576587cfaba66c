// Pool, the part about streams that are not remembered: held ones, those of threads, and those that are seen again.
#include "pool/stream_lookup.hpp"

namespace rmm_bridge {

// The same, also if it does not; false if nobody holds a stream that has the handle.
bool Pool::find_held(CUstream handle, KnownStream& out) const noexcept {
  std::scoped_lock lock(lock_);
  if (recall(handle, out))
    return true;  // here: another thread may close the lane's front for a moment, and does so under the lock
  Lane* const lane = lanes_.find_held(handle);
  if (lane == nullptr) return false;
  remember(*lane);
  out = {{lane->stream.key, handle}, lane};
  return true;
}

// This thread's own stream in the pool's context, which need not be the current one; a thread may have none at all, where
// CUDA's runtime would make it one.
Refusal Pool::resolve_per_thread(KnownStream& out) const noexcept {
  const DriverScope scope(driver_, events_->context());
  if (events_->capture_status(CU_STREAM_PER_THREAD) != CU_STREAM_CAPTURE_STATUS_NONE) return Refusal::capturing;
  if (!find_held(CU_STREAM_PER_THREAD, out)) out = {{events_->id_of(CU_STREAM_PER_THREAD), CU_STREAM_PER_THREAD}};
  return out.key == 0 ? Refusal::bad_stream : Refusal::none;
}

// For a free, which must not fail, and for a note that a stream uses a block: both also while it is being captured. One that
// nobody holds is then taken for the stream that was last seen with its handle. That one may be gone and the handle another's:
// then what waits for it waits for ever. False if there is no such stream, or no device that this memory could be used on.
bool Pool::resolve_for_free(CUstream handle, KnownStream& out) const noexcept {
  const Refusal refusal = resolve(handle, out);
  if (refusal == Refusal::none) return !out.host();
  if (refusal != Refusal::capturing) return false;
  if (find_held(handle, out)) return true;
  out = {{StreamRef::kUnseenKey, handle, true}};
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
void Pool::seen_again(std::uint16_t index, const StreamRef& stream) {
  Lane& lane = lanes_.at(index);
  std::uint64_t later = 0;
  const bool awaited = with_lock([&] {
    later = quarantine_.next_number();
    return lane.unrecorded_count != 0;
  });
  EventRef event;
  if (!awaited || KeepGil::kept()) return;
  const WithoutGil without(process_);
  if (events_->record(stream, event) == Recorded::done) with_lock([&] { quarantine_.sign(lane, event, later); });
}

}  // namespace rmm_bridge
