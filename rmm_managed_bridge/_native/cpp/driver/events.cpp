#include "driver/events.hpp"

#include <mutex>

namespace rmm_bridge {

DeviceEvent::~DeviceEvent() { home->put(handle); }

Recorded EventPool::record(StreamRef stream, EventRef& out) {
  DriverScope scope(&driver_, context_);
  // Looked at before as well: a capture that another thread ends between the event, which went into it, and the look after would
  // leave an event that stands behind nothing.
  if (capture_status(stream.handle) != CU_STREAM_CAPTURE_STATUS_NONE) return Recorded::capturing;
  if (stream.per_thread() && id_of(stream.handle) != stream.key) {
    stream = {StreamRef::kLegacyKey, nullptr};
    if (capture_status(stream.handle) != CU_STREAM_CAPTURE_STATUS_NONE) return Recorded::capturing;
  }
  CUevent event = get();
  if (event == nullptr) return Recorded::failed;
  // In a capture that is lost already, recording fails, and the result says so: a handle that failed is not asked again.
  const CUresult result = driver_.event_record(event, stream.handle);
  const bool capturing = result == CUDA_SUCCESS
                             ? !stream.legacy() && capture_status(stream.handle) != CU_STREAM_CAPTURE_STATUS_NONE
                             : result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_CAPTURED_EVENT;
  if (result != CUDA_SUCCESS || capturing) {
    driver_.event_destroy(event);
    return capturing ? Recorded::capturing : Recorded::failed;
  }
  try {
    out = std::make_shared<DeviceEvent>(event, this);
  } catch (...) {
    put(event);
    throw;
  }
  return Recorded::done;
}

Ended EventPool::look(const EventRef& event) const {
  if (event->done.load(std::memory_order_acquire)) return Ended::yes;
  DriverScope scope(&driver_, context_);
  const CUresult result = driver_.event_query(event->handle);
  if (result != CUDA_SUCCESS) return result == CUDA_ERROR_NOT_READY ? Ended::not_yet : Ended::unknown;
  event->done.store(true, std::memory_order_release);
  return Ended::yes;
}

bool EventPool::synchronize(const EventRef& event) const {
  if (event->done.load(std::memory_order_acquire)) return true;
  DriverScope scope(&driver_, context_);
  if (driver_.event_synchronize(event->handle) != CUDA_SUCCESS) return false;
  event->done.store(true, std::memory_order_release);
  return true;
}

bool EventPool::synchronize_device() const {
  DriverScope scope(&driver_, context_);
  return driver_.ctx_synchronize() == CUDA_SUCCESS;
}

bool EventPool::legacy_is_blocked() const {
  DriverScope scope(&driver_, context_);
  return capture_status(nullptr) != CU_STREAM_CAPTURE_STATUS_NONE;
}

bool EventPool::stream_waits(const StreamRef& stream, const EventRef& event) const {
  DriverScope scope(&driver_, context_);
  if (stream.legacy() && capture_status(stream.handle) != CU_STREAM_CAPTURE_STATUS_NONE) return false;
  return driver_.stream_wait_event(stream.handle, event->handle, 0) == CUDA_SUCCESS;
}

CUevent EventPool::get() {
  {
    std::scoped_lock lock(lock_);
    if (!idle_.empty()) {
      CUevent event = idle_.back();
      idle_.pop_back();
      return event;
    }
  }
  CUevent event = nullptr;
  return driver_.event_create(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS ? event : nullptr;
}

void EventPool::put(CUevent event) noexcept {
  std::scoped_lock lock(lock_);
  try {
    idle_.push_back(event);
  } catch (...) {  // one event of a few hundred bytes stays with the driver
  }
}

}  // namespace rmm_bridge
