// The few CUDA driver functions that the bridge calls, in one table: looked up at run time, so that the package
// imports and works where there is no driver, and replaced as a whole by the tests' fake driver.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

namespace rmm_bridge {

// Name in the table, declaration in cuda.h (whose macros map some names to their newest version), exported symbol.
// The symbols are the ones without "_ptsz": for those, stream 0 is the legacy stream, whatever the caller was built with.
// Advice and prefetch are those that take a location, as cuda.h declares them. Both came with CUDA 12.2.
#define BRIDGE_DRIVER_FUNCTIONS(X)                                                                 \
  X(init, cuInit, "cuInit")                                                                        \
  X(device_count, cuDeviceGetCount, "cuDeviceGetCount")                                            \
  X(device_attribute, cuDeviceGetAttribute, "cuDeviceGetAttribute")                                \
  X(device_memory, cuDeviceTotalMem, "cuDeviceTotalMem_v2")                                        \
  X(memory_info, cuMemGetInfo, "cuMemGetInfo_v2")                                                  \
  X(primary_retain, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")                          \
  X(primary_state, cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState")                       \
  X(ctx_push, cuCtxPushCurrent, "cuCtxPushCurrent_v2")                                             \
  X(ctx_pop, cuCtxPopCurrent, "cuCtxPopCurrent_v2")                                                \
  X(ctx_synchronize, cuCtxSynchronize, "cuCtxSynchronize")                                         \
  X(ctx_current, cuCtxGetCurrent, "cuCtxGetCurrent")                                               \
  X(ctx_device, cuCtxGetDevice, "cuCtxGetDevice")                                                  \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode") \
  X(stream_create, cuStreamCreate, "cuStreamCreate")                                               \
  X(stream_id, cuStreamGetId, "cuStreamGetId")                                                     \
  X(stream_context, cuStreamGetCtx, "cuStreamGetCtx")                                              \
  X(stream_is_capturing, cuStreamIsCapturing, "cuStreamIsCapturing")                               \
  X(capture_info, cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo_v3")                             \
  X(stream_wait_event, cuStreamWaitEvent, "cuStreamWaitEvent")                                     \
  X(event_create, cuEventCreate, "cuEventCreate")                                                  \
  X(event_destroy, cuEventDestroy, "cuEventDestroy_v2")                                            \
  X(event_record, cuEventRecord, "cuEventRecord")                                                  \
  X(event_query, cuEventQuery, "cuEventQuery")                                                     \
  X(event_synchronize, cuEventSynchronize, "cuEventSynchronize")                                   \
  X(copy_to_host, cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2")                                       \
  X(host_alloc, cuMemHostAlloc, "cuMemHostAlloc")                                                  \
  X(host_free, cuMemFreeHost, "cuMemFreeHost")                                                     \
  X(mem_advise, cuMemAdvise, "cuMemAdvise_v2")                                                     \
  X(mem_prefetch, cuMemPrefetchAsync, "cuMemPrefetchAsync_v2")                                     \
  X(pointer_attribute, cuPointerGetAttribute, "cuPointerGetAttribute")                             \
  X(mem_pool_access, cuMemPoolGetAccess, "cuMemPoolGetAccess")                                     \
  X(error_name, cuGetErrorName, "cuGetErrorName")

// Devices that a process may have.
inline constexpr int kDevices = 64;

struct Driver {
#define BRIDGE_DECLARE(name, declaration, symbol) decltype(&::declaration) name = nullptr;
  BRIDGE_DRIVER_FUNCTIONS(BRIDGE_DECLARE)
#undef BRIDGE_DECLARE

  bool loaded = false;  // every function was found and cuInit succeeded
  int devices = 0;
  std::string why_not;  // for people, where `loaded` is false or `devices` is 0

  // Loads `library`; may be called again after a failure. Makes no context.
  void load(const char* library);

  std::string name_of(CUresult result) const;

  // Bytes of memory that all devices have together.
  std::size_t total_memory() const;

  int attribute(int device, int which) const;

  // True on a thread that runs a CUDA host function now. The driver refuses it most calls, and what it waits for may stand behind
  // itself: it may make no other call than this.
  bool in_host_function() const noexcept {
    CUcontext context;
    return ctx_current(&context) == CUDA_ERROR_NOT_PERMITTED;
  }
};

// While one lives, this thread has `context` current and its capture mode is relaxed, so that nothing it calls can break a
// capture in global mode on another thread, as event queries, waits and allocation would (docs/design/measured.md).
class DriverScope {
 public:
  DriverScope(const Driver* driver, CUcontext context) : driver_(driver), pushed_(context != nullptr) {
    if (driver_ == nullptr) return;
    driver_->exchange_capture_mode(&mode_);
    if (pushed_) pushed_ = driver_->ctx_push(context) == CUDA_SUCCESS;
  }
  ~DriverScope() {
    if (driver_ == nullptr) return;
    if (pushed_) {
      CUcontext popped;
      driver_->ctx_pop(&popped);
    }
    driver_->exchange_capture_mode(&mode_);
  }
  DriverScope(const DriverScope&) = delete;
  DriverScope& operator=(const DriverScope&) = delete;

 private:
  const Driver* driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool pushed_;
};

}  // namespace rmm_bridge
