// Which device work a freed block must wait for: events, and the lanes that stand for streams.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/biased_lock.hpp"
#include "driver/driver.hpp"
#include "pages/size_class.hpp"
#include "pages/span.hpp"
#include "base/spin_lock.hpp"

namespace rmm_bridge {

struct Lane;

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
  Lane* lane = nullptr;  // where it was known from; perhaps another stream's by now, as the lane's front says

  bool host() const noexcept { return key == kHostKey; }
  bool legacy() const noexcept { return key == kLegacyKey; }
};

class EventPool;

struct DeviceEvent {
  CUevent handle;
  EventPool* home;
  ~DeviceEvent();
};
using EventRef = std::shared_ptr<DeviceEvent>;

enum class Recorded {
  done,
  capturing,  // the stream takes part in a capture: no event can be had until it ends
  failed,     // the driver refused; the stream counts as never finished
};

class EventPool {
 public:
  EventPool(const Driver& driver, CUcontext context) : driver_(driver), context_(context) {}

  SpinLock& lock_for_fork() noexcept { return lock_; }
  CUcontext context() const noexcept { return context_; }

  // Records an event on `stream` as it is now. An event on another thread's per-thread stream cannot be recorded from
  // here; the legacy stream waits for it, so an event there comes after it. Never breaks a capture: the event is recorded first and the stream
  // looked at after, so that a capture that another thread begins in between is seen; a captured event is neither
  // queried nor waited on. The legacy stream is not touched while a blocking stream is being captured.
  Recorded record(StreamRef stream, EventRef& out) {
    DriverScope scope(&driver_, context_);
    if (stream.handle == CU_STREAM_PER_THREAD) {
      if (capture_status(stream.handle) != CU_STREAM_CAPTURE_STATUS_NONE) return Recorded::capturing;
      if (id_of(stream.handle) != stream.key) stream = {StreamRef::kLegacyKey, nullptr};
    }
    if (stream.legacy() && capture_status(stream.handle) != CU_STREAM_CAPTURE_STATUS_NONE) return Recorded::capturing;
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
    out = std::make_shared<DeviceEvent>(event, this);
    return Recorded::done;
  }

  bool finished(const EventRef& event) const {
    DriverScope scope(&driver_, context_);
    return driver_.event_query(event->handle) == CUDA_SUCCESS;
  }

  // Call it without the GIL and without a lock: it may take as long as the device does.
  bool synchronize(const EventRef& event) const {
    DriverScope scope(&driver_, context_);
    return driver_.event_synchronize(event->handle) == CUDA_SUCCESS;
  }

  // For the whole device. It destroys every capture in the context: see Pool::synchronize_device.
  bool synchronize_device() const {
    DriverScope scope(&driver_, context_);
    return driver_.ctx_synchronize() == CUDA_SUCCESS;
  }

  // True while a blocking stream of this context is being captured, whoever's it is.
  bool legacy_is_blocked() const {
    DriverScope scope(&driver_, context_);
    return capture_status(nullptr) != CU_STREAM_CAPTURE_STATUS_NONE;
  }

  bool stream_waits(const StreamRef& stream, const EventRef& event) const {
    DriverScope scope(&driver_, context_);
    if (stream.legacy() && capture_status(stream.handle) != CU_STREAM_CAPTURE_STATUS_NONE) return false;
    return driver_.stream_wait_event(stream.handle, event->handle, 0) == CUDA_SUCCESS;
  }

  // 0, which no stream has, for a handle that the driver does not take. It ends a capture of the stream: see stream_lookup.hpp.
  std::uint64_t id_of(CUstream stream) const {
    unsigned long long id = 0;
    return driver_.stream_id(stream, &id) == CUDA_SUCCESS ? id : 0;
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

  CUevent get() {
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

  void put(CUevent event) noexcept {
    std::scoped_lock lock(lock_);
    try {
      idle_.push_back(event);
    } catch (...) {  // one event of a few hundred bytes stays with the driver
    }
  }

  const Driver& driver_;
  CUcontext context_;
  SpinLock lock_;
  std::vector<CUevent> idle_;
};

inline DeviceEvent::~DeviceEvent() { home->put(handle); }

// Blocks of one size, the newest on top. A std::vector whose growing is out of the way: the compiler makes a call of each
// push_back.
class alignas(32) BlockStack {  // a power of two: finding one by its number is a shift
 public:
  BlockStack() = default;
  BlockStack(const BlockStack&) = delete;
  BlockStack& operator=(const BlockStack&) = delete;

  bool empty() const noexcept { return top_ == bottom_; }
  bool full() const noexcept { return top_ == end_; }
  std::size_t size() const noexcept { return static_cast<std::size_t>(top_ - bottom_); }
  Block** begin() const noexcept { return bottom_; }
  Block** end() const noexcept { return top_; }
  void clear() noexcept { top_ = bottom_; }
  void push(Block* block) noexcept { *top_++ = block; }  // unless full
  Block* pop() noexcept { return *--top_; }

  // Room for so many more. Throws std::bad_alloc and then has changed nothing.
  [[gnu::noinline]] void reserve(std::size_t more) {
    const std::size_t count = size();
    if (static_cast<std::size_t>(end_ - top_) >= more) return;
    const std::size_t room = std::max({2 * count, count + more, std::size_t{16}});
    auto* grown = static_cast<Block**>(std::realloc(bottom_, room * sizeof(Block*)));
    if (grown == nullptr) throw std::bad_alloc();
    bottom_ = grown;
    top_ = grown + count;
    end_ = grown + room;
  }

 private:
  Block** bottom_ = nullptr;
  Block** top_ = nullptr;
  Block** end_ = nullptr;
};

// The part of a lane that its own stream uses without the pool's lock: blocks that were freed last, and counts that the
// pool has not seen yet. Guarded by its own lock, which is taken under the pool's or alone. `Pool::drain` moves what is
// here to the lane; whoever looks at a lane under the pool's lock drains it first.
struct alignas(64) Front {
  static constexpr std::uint64_t kClosed = 0;  // which no stream has

  BiasedLock lock;
  std::atomic<std::uint64_t> key{kClosed};  // of the lane's stream, while that is held: frees need no event. Set under the lock
  // By size class; never freed, as lanes are not.
  BlockStack* bins = kNoBins.data();
  bool filled = false;  // its bins are its own
  std::uint32_t bin_count = 0;  // those that ever held a block
  std::size_t free_bytes = 0;
  std::size_t known_free_bytes = 0;  // as the pool knows it: what is missing since is used, what is more is not
  std::ptrdiff_t live_delta = 0;
  std::ptrdiff_t asked_delta = 0;  // of what was asked for in them

  // Makes room for more blocks of a class. Throws std::bad_alloc.
  [[gnu::noinline]] BlockStack& make_room(std::uint32_t class_index, std::size_t more) {
    if (!filled) bins = new BlockStack[kSizeClasses];
    filled = true;
    bin_count = std::max(bin_count, class_index + 1);
    bins[class_index].reserve(more);
    return bins[class_index];
  }

  bool untouched() const noexcept { return free_bytes == 0 && known_free_bytes == 0 && live_delta == 0 && asked_delta == 0; }

 private:
  // Where nothing can be taken and nothing put: so a front that was never filled needs no look of its own.
  static inline constinit std::array<BlockStack, kSizeClasses> kNoBins{};
};

// The free blocks that one stream may take without waiting, and how the end of that stream's work can be known.
struct Lane {
  StreamRef stream;
  std::uint16_t index = 0;
  const void* home = nullptr;  // the table that it is in
  // Owned: the bridge holds the framework's stream object, so the handle is good at any time and an event is only
  // recorded when somebody else wants the memory. Borrowed: an event was recorded at each free.
  bool owned = false;
  bool in_use = false;
  void* owner = nullptr;       // the stream object, opaque here
  int users = 0;               // threads that use the handle outside the lock; the lane is not retired meanwhile
  std::size_t live_count = 0;  // blocks handed out on this lane
  std::uint64_t version = 0;   // counts changes of `events`
  std::vector<EventRef> events;
  std::vector<std::vector<Block*>> bins;  // by size class
  std::size_t free_bytes = 0;
  Front front;

  std::vector<Block*>& bin(std::uint32_t class_index) {
    if (bins.size() <= class_index) bins.resize(class_index + 1);
    return bins[class_index];
  }
};

// Something a block waits for: an event, or, where none could be recorded yet, an owned lane to record one on.
struct Wait {
  std::uint16_t lane = 0;
  EventRef event;
  bool done = false;
};

// Blocks that share what they wait for.
struct Batch {
  std::uint64_t number = 0;
  std::vector<Wait> waits;  // each keeps its lane's number taken until the batch is done
  std::vector<Block*> blocks;
  std::size_t bytes = 0;
  bool fresh = false;  // CPU blocks that no work is known of: see Pool::flush_fresh
};

}  // namespace rmm_bridge
