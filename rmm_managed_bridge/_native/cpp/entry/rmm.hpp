// The pool as an RMM resource, and an RMM resource as the pool's upstream. The one header that includes RMM.
#pragma once

#include <rmm/aligned.hpp>
#include <rmm/error.hpp>
#include <rmm/logger.hpp>
#include <rmm/resource_ref.hpp>

#include <cuda/memory_resource>
#include <cuda/stream_ref>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "entry/interpreter.hpp"
#include "entry/python_allocate.hpp"
#include "pool/pool_calls.hpp"

namespace rmm_bridge {

// RMM's pool writes an error line for each request that it refuses, and ours often ends well all the same: what is free goes back
// and is asked for again. What RMM says goes into the error, if there is one. Where a program has set RMM's logger to tell more than
// usual it is left alone.
class QuietRmm {
 public:
  QuietRmm() {
    std::scoped_lock lock(lock_);
    rapids_logger::logger& logger = rmm::default_logger();
    if (inside_++ != 0 || logger.level() < rapids_logger::level_enum::info) return;
    before_ = logger.level();
    logger.set_level(std::max(before_, kQuiet));
  }
  ~QuietRmm() {
    std::scoped_lock lock(lock_);
    rapids_logger::logger& logger = rmm::default_logger();
    // Unless somebody has set it meanwhile.
    if (--inside_ == 0 && logger.level() == kQuiet) logger.set_level(before_);
  }
  QuietRmm(const QuietRmm&) = delete;
  QuietRmm& operator=(const QuietRmm&) = delete;

 private:
  // The logger is the process's, and threads ask at once: the first one in and the last one out.
  static constexpr auto kQuiet = rapids_logger::level_enum::critical;
  static inline std::mutex lock_;
  static inline int inside_ = 0;
  static inline auto before_ = kQuiet;
};

// Large pieces from an RMM resource, always on one stream of our own that never blocks on the legacy stream and never
// is captured: RMM's pool records events on the streams it is called with, and asks for their ids.
class RmmUpstream final : public Upstream {
 public:
  RmmUpstream(cuda::mr::any_resource<cuda::mr::device_accessible> resource, const Driver* driver, CUcontext context)
      : resource_(std::in_place, std::move(resource)), driver_(driver), context_(context) {
    if (driver_ == nullptr) return;
    DriverScope scope(driver_, context_);
    if (driver_->stream_create(&stream_, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) throw std::bad_alloc();
    if (driver_->event_create(&event_, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) throw std::bad_alloc();
  }

  // The last reference to a pool of RMM's frees what it has, perhaps while another thread captures.
  ~RmmUpstream() override {
    DriverScope scope(driver_, context_);
    resource_.reset();
  }

  void* allocate(std::size_t bytes) noexcept override {
    DriverScope scope(driver_, context_);
    void* ptr = nullptr;
    try {
      const QuietRmm quiet;
      sleep_instead_of_ending(
          [&] { ptr = resource_->allocate(cuda::stream_ref{stream_}, bytes, rmm::CUDA_ALLOCATION_ALIGNMENT); });
    } catch (const std::exception& error) {  // out of memory in any of the ways that resources have
      note(error.what());
      return nullptr;
    } catch (...) {
      note("");
      return nullptr;
    }
    // A pool that others use too may have given memory that their work still touches, and only made our stream wait.
    if (driver_ != nullptr &&
        (driver_->event_record(event_, stream_) != CUDA_SUCCESS || driver_->event_synchronize(event_) != CUDA_SUCCESS)) {
      return nullptr;  // the device is in an error state: the memory stays lost
    }
    return ptr;
  }

  void deallocate(void* ptr, std::size_t bytes) noexcept override {
    DriverScope scope(driver_, context_);
    sleep_instead_of_ending(
        [&] { resource_->deallocate(cuda::stream_ref{stream_}, ptr, bytes, rmm::CUDA_ALLOCATION_ALIGNMENT); });
  }

  bool gives_zeros() const noexcept override { return false; }
  std::size_t chunk_bytes() const noexcept override { return std::size_t{64} << 20; }

  std::string refused_by() const override {
    std::scoped_lock lock(said_lock_);
    return "the RMM resource that the pool stands on" + (said_.empty() ? said_ : ": " + said_);
  }

 private:
  void note(std::string_view said) noexcept {
    constexpr std::size_t kMost = 400;
    try {
      std::string kept(said.substr(0, kMost));
      std::scoped_lock lock(said_lock_);
      said_.swap(kept);
    } catch (const std::bad_alloc&) {  // then the error says less
    }
  }

  std::optional<cuda::mr::any_resource<cuda::mr::device_accessible>> resource_;  // empty only at the end
  const Driver* driver_;
  CUcontext context_;
  CUstream stream_ = nullptr;  // it and the event stay with the context: the upstream ends when the pool closes
  CUevent event_ = nullptr;
  mutable SpinLock said_lock_;
  std::string said_;
};

// What RMM copies and calls, from any thread, with or without the GIL.
class BridgeResource {
 public:
  BridgeResource(TrackedPool* pool, Origin* origin, std::uint8_t framework)
      : pool_(pool), origin_(origin), framework_(framework) {}

  void* allocate(cuda::stream_ref stream, std::size_t bytes, std::size_t alignment) {
    void* ptr = take(stream.get(), false, bytes, alignment);
    if (pool_->prefetches_new(bytes)) [[unlikely]]
      pool_->prefetch_new(ptr, bytes, stream.get());
    return ptr;
  }

  void deallocate(cuda::stream_ref stream, void* ptr, std::size_t bytes, std::size_t) noexcept {
    CUstream handle = stream.get();
    TrackedPool::deallocate(pool_->process(), ptr, bytes, &handle, who());
  }

  // Host-ordered: no stream has work on it, none is waited for, and there is none to prefetch it on.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) { return take(nullptr, true, bytes, alignment); }

  // The caller promises, as with any resource, that the device is done with the block.
  void deallocate_sync(void* ptr, std::size_t bytes, std::size_t) noexcept {
    TrackedPool::deallocate(pool_->process(), ptr, bytes, nullptr, who());
  }

  bool operator==(const BridgeResource& other) const noexcept { return pool_ == other.pool_; }
  friend void get_property(const BridgeResource&, cuda::mr::device_accessible) noexcept {}

 private:
  Provenance who() noexcept { return origin_->freeing(framework_, pool_->track()); }

  void* take(CUstream stream, bool host_ordered, std::size_t bytes, std::size_t alignment) {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > kGranule) {
      throw std::invalid_argument("rmm_managed_bridge: an alignment is a power of two up to 262144");
    }
    const Request request{
        .bytes = bytes, .alignment = alignment, .side = Side::gpu, .host_ordered = host_ordered, .stream = stream};
    Refusal refusal;
    void* ptr = allocate_with_site(pool_, origin_, framework_, request, refusal);
    switch (refusal) {
      case Refusal::none:
        return ptr;
      case Refusal::out_of_memory:
        throw rmm::out_of_memory("rmm_managed_bridge: out of memory");
      case Refusal::timed_out:
        throw rmm::out_of_memory(
            "rmm_managed_bridge: out of memory, and the device work that freed memory waits for does not end");
      case Refusal::host_function:
        throw rmm::out_of_memory("rmm_managed_bridge: a CUDA host function can be given no more memory; allocate before it");
      case Refusal::over_budget:
        throw rmm::out_of_memory("rmm_managed_bridge: the limit of the tag would be passed");
      case Refusal::capturing:
        throw std::runtime_error(
            "rmm_managed_bridge: managed memory cannot be allocated on a stream that is being captured; allocate "
            "before the capture begins");
      case Refusal::other_device:
      case Refusal::bad_stream:
      case Refusal::unheld_stream:
        break;
    }
    throw std::invalid_argument("rmm_managed_bridge: this is not a stream of the resource's device");
  }

  TrackedPool* pool_;
  Origin* origin_;
  std::uint8_t framework_;
};

static_assert(cuda::mr::resource_with<BridgeResource, cuda::mr::device_accessible>);

inline TrackedPool* new_rmm_pool(Process* process, rmm::device_async_resource_ref upstream, bool ordered, int device,
                                 const PoolOptions& options, int kind, int track) {
  CUcontext context = nullptr;
  const Driver* driver = ordered ? &process->driver : nullptr;
  if (ordered && driver->primary_retain(&context, device) != CUDA_SUCCESS) {
    throw std::runtime_error("the CUDA driver gives no context for device " + std::to_string(device));
  }
  auto owned = std::make_unique<RmmUpstream>(cuda::mr::any_resource<cuda::mr::device_accessible>(upstream), driver, context);
  return new_pool(process, std::move(owned), driver, context, options, device, kind, track);
}

}  // namespace rmm_bridge
