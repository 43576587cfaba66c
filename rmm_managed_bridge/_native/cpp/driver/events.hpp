// Events behind the work of streams, and streams as one call sees them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/spin_lock.hpp"
#include "driver/driver.hpp"

namespace rmm_bridge {

// A stream as one call sees it. `key` is its id (cuStreamGetId), which unlike the handle never comes back; the legacy
// stream has a constant, since asking for its id while a blocking stream is captured destroys that capture.
struct StreamRef {
  static constexpr std::uint64_t kHostKey = ~std::uint64_t{0};
  static constexpr std::uint64_t kLegacyKey = ~std::uint64_t{0} - 1;
  // Any stream that is being captured and was not seen before: its id cannot be had. What waits for it waits for ever.
  static constexpr std::uint64_t kUnseenKey = ~std::uint64_t{0} - 2;
  std::uint64_t key = kHostKey;
  CUstream handle = nullptr;
  bool guessed = false;  // it is being captured, and `key` is of the stream that was last seen with its handle

  bool host() const noexcept { return key == kHostKey; }
  bool legacy() const noexcept { return key == kLegacyKey; }
  bool per_thread() const noexcept { return handle == CU_STREAM_PER_THREAD; }
};

class EventPool;

// An event that was recorded, once. It goes back to its pool with its last reference.
struct DeviceEvent {
  DeviceEvent(CUevent handle, EventPool* home) : handle(handle), home(home) {}
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  CUevent handle;
  EventPool* home;
  std::atomic<bool> done{false};  // the work before it has ended, as somebody has seen: that stays so
};
using EventRef = std::shared_ptr<DeviceEvent>;

enum class Recorded {
  done,
  capturing,  // the stream takes part in a capture: no event can be had until it ends
  failed,     // the driver refused; the stream counts as never finished
};

enum class Ended {
  yes,
  not_yet,
  unknown,  // the driver does not say, and asking again will not help: the context is lost
};

class EventPool {
 public:
  EventPool(const Driver& driver, CUcontext context) : driver_(driver), context_(context) {}

  SpinLock& lock_for_fork() noexcept { return lock_; }
  CUcontext context() const noexcept { return context_; }

  // Records an event on `stream` as it is now. An event on another thread's per-thread stream cannot be recorded from
  // here; the legacy stream waits for it, so an event there comes after it. Never breaks a capture: the event is recorded
  // first and the stream looked at after, so that a capture that another thread begins in between is seen; a captured event
  // is neither queried nor waited on. The legacy stream is not touched while a blocking stream is being captured. `out` is set
  // only if it is done. May throw std::bad_alloc.
  Recorded record(StreamRef stream, EventRef& out);

  // Asks the driver until it has said so once.
  Ended look(const EventRef& event) const;
  bool finished(const EventRef& event) const { return look(event) == Ended::yes; }

  // Call it without the GIL and without a lock: it may take as long as the device does.
  bool synchronize(const EventRef& event) const;

  // For the whole device. It destroys every capture in the context: see Pool::synchronize_device.
  bool synchronize_device() const;

  // True while a blocking stream of this context is being captured, whoever's it is.
  bool legacy_is_blocked() const;

  bool stream_waits(const StreamRef& stream, const EventRef& event) const;

  // 0, which no stream has, for a handle that the driver does not take. It ends a capture of the stream: see stream_lookup.hpp.
  std::uint64_t id_of(CUstream stream) const {
    unsigned long long id = 0;
    return driver_.stream_id(stream, &id) == CUDA_SUCCESS ? id : 0;
  }

  // The device of a stream if it is not that of these events, none of which could be recorded on it; -1 if it is, or if the driver
  // does not say. Contexts may differ on one device.
  int other_device(CUstream stream) const {
    CUcontext context = nullptr;
    if (driver_.stream_context(stream, &context) != CUDA_SUCCESS || context == context_) return -1;
    const int theirs = device_of(context);
    return theirs == device_of(context_) ? -1 : theirs;
  }

  // Which capture the stream takes part in, by a number that no other one has; 0 if in none, or if it cannot be told: of the legacy
  // stream, and of another thread's per-thread stream.
  std::uint64_t capture_of(const StreamRef& stream) const {
    if (stream.legacy() || stream.per_thread()) return 0;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t id = 0;
    const CUresult result = driver_.capture_info(stream.handle, &status, &id, nullptr, nullptr, nullptr, nullptr);
    return result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? id : 0;
  }

  CUstreamCaptureStatus capture_status(CUstream stream) const {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    const CUresult result = driver_.stream_is_capturing(stream, &status);
    // For the legacy stream while a blocking stream is captured: "do not touch it now", and no harm was done.
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return result == CUDA_SUCCESS ? status : CU_STREAM_CAPTURE_STATUS_NONE;
  }

 private:
  friend struct DeviceEvent;

  int device_of(CUcontext context) const {
    DriverScope scope(&driver_, context);
    CUdevice device = -1;
    return driver_.ctx_device(&device) == CUDA_SUCCESS ? device : -1;
  }

  CUevent get();
  void put(CUevent event) noexcept;

  const Driver& driver_;
  CUcontext context_;
  SpinLock lock_;
  std::vector<CUevent> idle_;
};

}  // namespace rmm_bridge
