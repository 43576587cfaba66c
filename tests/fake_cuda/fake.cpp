// A CUDA driver for tests: the functions that the bridge calls, and the strings a test pulls (fake_*).
// Control functions name streams by id, since handles come back.
#include <chrono>

#include "enter.hpp"

using namespace fake;

namespace {

Event* as_event(CUevent event) { return reinterpret_cast<Event*>(event); }
}  // namespace

extern "C" {

CUresult CUDAAPI cuInit(unsigned) {
  return enter("cuInit", [](Device&) { return CUDA_SUCCESS; });
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  return enter("cuDeviceGetCount", [&](Device& d) {
    *count = static_cast<int>(d.primary.size());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice number) {
  return enter("cuDeviceGetAttribute", [&](Device& d) {
    auto found = d.attributes.find({number, static_cast<int>(which)});
    *value = found == d.attributes.end() ? 1 : found->second;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceTotalMem(size_t* bytes, CUdevice) {
  return enter("cuDeviceTotalMem", [&](Device& d) {
    *bytes = d.memory_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return enter("cuMemGetInfo", [&](Device& d) {
    if (d.current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *total_bytes = d.memory_bytes;
    *free_bytes = d.memory_bytes - std::min(d.memory_bytes, d.others_bytes);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice number) {
  return enter("cuDevicePrimaryCtxRetain", [&](Device& d) {
    if (number < 0 || number >= static_cast<int>(d.primary.size())) return CUDA_ERROR_INVALID_DEVICE;
    *context = reinterpret_cast<CUcontext>(d.primary[static_cast<std::size_t>(number)]);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice number, unsigned* flags, int* active) {
  return enter("cuDevicePrimaryCtxGetState", [&](Device& d) {
    *flags = 0;
    *active = d.inactive.count(number) == 0 ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  return enter("cuCtxPushCurrent", [&](Device&) {
    contexts.push_back(reinterpret_cast<Context*>(context));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
  return enter("cuCtxPopCurrent", [&](Device& d) {
    if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *context = reinterpret_cast<CUcontext>(d.current());
    contexts.pop_back();
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  return enter("cuCtxGetCurrent", [&](Device& d) {
    if (in_host_function) return CUDA_ERROR_NOT_PERMITTED;
    *context = reinterpret_cast<CUcontext>(d.current());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* number) {
  return enter("cuCtxGetDevice", [&](Device& d) {
    if (d.current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *number = d.current()->device;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return enter("cuThreadExchangeStreamCaptureMode", [&](Device&) {
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned flags) {
  return enter("cuStreamCreate", [&](Device& d) {
    if (d.current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *stream = reinterpret_cast<CUstream>(d.create(d.current(), flags)->handle);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamGetId(CUstream handle, unsigned long long* id) {
  return enter("cuStreamGetId", [&](Device& d) {
    Stream* stream = d.find(handle);
    if (stream == nullptr) return missing(handle, d);
    if (stream->legacy && d.lose_blocking(stream->context, "cuStreamGetId of the legacy stream")) {
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (stream->capture != nullptr) {
      d.lose(stream->capture, "cuStreamGetId of a captured stream");
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    *id = stream->id;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return enter("cuStreamGetCtx", [&](Device& d) {
    Stream* stream = d.find(handle);
    if (stream == nullptr) return missing(handle, d);
    // What the driver does for a captured stream is not measured: nobody is to rely on it.
    if (stream->capture != nullptr) d.blame("cuStreamGetCtx of a captured stream");
    *context = reinterpret_cast<CUcontext>(stream->context);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return enter("cuStreamIsCapturing", [&](Device& d) {
    Stream* stream = d.find(handle);
    if (stream == nullptr) return missing(handle, d);  // the real one crashes for a destroyed stream
    if (stream->legacy && d.has_blocking_capture(stream->context)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = stream->capture == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->lost    ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                         : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph*,
                                        const CUgraphNode**, const CUgraphEdgeData**, size_t*) {
  return enter("cuStreamGetCaptureInfo", [&](Device& d) {
    Stream* stream = d.find(handle);
    if (stream == nullptr) return missing(handle, d);
    if (stream->legacy && d.has_blocking_capture(stream->context)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    const bool active = stream->capture != nullptr && !stream->capture->lost;
    *status = active ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    if (active) *id = stream->capture->id;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
  return enter("cuStreamWaitEvent", [&](Device& d) {
    Stream* stream = d.find(handle);
    if (stream == nullptr) return missing(handle, d);
    if (stream->legacy && d.lose_blocking(stream->context, "a wait on the legacy stream")) {
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    Capture* captured = as_event(event)->captured;
    if (stream->capture != nullptr && captured != stream->capture) {
      d.lose(stream->capture, "a wait for an event from outside the capture");
      return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (captured != nullptr && !captured->members.empty()) {
      captured->members.insert(stream);
      stream->capture = captured;
    } else {
      d.wait(stream, as_event(event)->nodes);
    }
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned) {
  return enter("cuEventCreate", [&](Device& d) {
    if (d.current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *event = reinterpret_cast<CUevent>(new Event{d.current(), {}, nullptr});
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventDestroy(CUevent event) {
  return enter("cuEventDestroy", [&](Device&) {
    delete as_event(event);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream handle) {
  return enter("cuEventRecord", [&](Device& d) {
    Stream* stream = d.find(handle);
    if (stream == nullptr) return missing(handle, d);
    if (stream->context != as_event(event)->context) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->legacy && d.lose_blocking(stream->context, "an event on the legacy stream")) {
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (stream->capture != nullptr && stream->capture->lost) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    as_event(event)->captured = stream->capture;
    as_event(event)->nodes = stream->capture == nullptr ? d.front_of(stream) : Front{};
    return CUDA_SUCCESS;
  });
}

static CUresult query(CUevent event) {
  return enter("cuEventQuery", [&](Device& d) {
    if (Capture* capture = as_event(event)->captured; capture != nullptr) {
      d.lose(capture, "a query of an event recorded in it");
      return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (d.unsafe("cuEventQuery")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const Front& nodes = as_event(event)->nodes;
    const bool done = std::all_of(nodes.begin(), nodes.end(), [](const NodeRef& node) { return node->done; });
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult CUDAAPI cuEventSynchronize(CUevent event) {
  return enter("cuEventSynchronize", [&](Device& d) {
    if (Capture* capture = as_event(event)->captured; capture != nullptr) {
      d.lose(capture, "a wait for an event recorded in it");
      return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (d.unsafe("cuEventSynchronize")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return wait_on_host(d, as_event(event)->nodes, "cuEventSynchronize");
  });
}

// Asked again and again for one event, and for nothing else, without the GIL and with short pauses, the device gets on: that is a
// wait, too. Not if it hangs.
CUresult CUDAAPI cuEventQuery(CUevent event) {
  using Clock = std::chrono::steady_clock;
  constexpr int kInARow = 32;
  constexpr std::chrono::milliseconds kShort{20};
  static thread_local CUevent asked = nullptr;
  static thread_local int in_a_row = 0;
  static thread_local Clock::time_point last;
  const CUresult result = query(event);
  const auto now = Clock::now();
  const bool waits = event == asked && result == CUDA_ERROR_NOT_READY && now - last < kShort && !gil_held();
  in_a_row = waits ? in_a_row + 1 : 0;
  asked = event;
  last = now;
  if (in_a_row < kInARow || device().hangs) return result;
  in_a_row = 0;
  return cuEventSynchronize(event);
}

CUresult CUDAAPI cuCtxSynchronize() {
  return enter("cuCtxSynchronize", [](Device& d) {
    if (d.current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (d.lose_all(d.current(), "cuCtxSynchronize")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return wait_on_host(d, d.everything(d.current()), "cuCtxSynchronize");
  });
}

CUresult CUDAAPI cuPointerGetAttribute(void* data, CUpointer_attribute which, CUdeviceptr ptr) {
  return enter("cuPointerGetAttribute", [&](Device& d) {
    auto found = d.pointers.find({ptr, static_cast<int>(which), d.current() == nullptr ? -1 : d.current()->device});
    if (found == d.pointers.end()) found = d.pointers.find({ptr, static_cast<int>(which), -1});
    if (found == d.pointers.end()) return CUDA_ERROR_INVALID_VALUE;
    // A device reaches what has an address there, and the access flags say yes whatever is set (docs/design/measured.md).
    if (which == CU_POINTER_ATTRIBUTE_ACCESS_FLAGS) {
      *static_cast<int*>(data) = 3;
      return CUDA_SUCCESS;
    }
    *static_cast<int*>(data) = found->second;  // as wide as most attributes are
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool pool, CUmemLocation* location) {
  return enter("cuMemPoolGetAccess", [&](Device& d) {
    const auto handle = reinterpret_cast<unsigned long long>(pool);
    const auto found = d.pointers.find({handle, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, location->id});
    *flags = static_cast<CUmemAccess_flags>(found == d.pointers.end() ? 0 : found->second);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuGetErrorName(CUresult result, const char** name) {
  static thread_local std::string text;
  text = "FAKE_CUDA_ERROR_" + std::to_string(static_cast<int>(result));
  *name = text.c_str();
  return CUDA_SUCCESS;
}

// --- what a test pulls ---

std::uintptr_t fake_stream_create(int number, int non_blocking) {
  FAKE_LOCKED;
  return d.create(d.primary.at(static_cast<std::size_t>(number)), non_blocking != 0 ? CU_STREAM_NON_BLOCKING : 0)->handle;
}

// The stream that a handle means on this thread, with `number` as the current device; 0 for a destroyed one.
unsigned long long fake_stream_id(std::uintptr_t handle, int number) {
  FAKE_LOCKED;
  contexts.push_back(d.primary.at(static_cast<std::size_t>(number)));
  const Stream* stream = d.find(reinterpret_cast<CUstream>(handle));
  contexts.pop_back();
  return stream == nullptr ? 0 : stream->id;
}

void fake_stream_destroy(unsigned long long id) {
  FAKE_LOCKED;
  d.destroy(d.by_id(id));
}

void fake_set_current(int number) {  // -1: no context
  FAKE_LOCKED;
  contexts.clear();
  if (number >= 0) contexts.push_back(d.primary.at(static_cast<std::size_t>(number)));
}

int fake_current() {
  FAKE_LOCKED;
  return d.current() == nullptr ? -1 : d.current()->device;
}

// This thread runs a CUDA host function from here on, or no longer.
void fake_set_host_function(int inside) { in_host_function = inside != 0; }

// Work ends only if a test ends it, however it is asked for.
void fake_set_hangs(int hangs) {
  FAKE_LOCKED;
  d.hangs = hangs != 0;
}

int fake_context_depth() { return static_cast<int>(contexts.size()); }
int fake_thread_mode() { return static_cast<int>(thread_mode); }

long fake_enqueue(unsigned long long id, int host) {
  FAKE_LOCKED;
  return d.enqueue(d.by_id(id), host != 0);
}

// `second` waits for all that is on `first`, as a program orders its streams itself.
void fake_join(unsigned long long first, unsigned long long second) {
  FAKE_LOCKED;
  d.wait(d.by_id(second), d.front_of(d.by_id(first)));
}

long fake_advance(unsigned long long id, long count) {
  FAKE_LOCKED;
  return d.advance(d.by_id(id), count);
}

void fake_finish(long op) {
  FAKE_LOCKED;
  d.finish(d.node(op));
}

void fake_finish_all() {
  FAKE_LOCKED;
  d.finish_all();
}

int fake_done(long op) {
  FAKE_LOCKED;
  return d.node(op)->done ? 1 : 0;
}

int fake_ordered(long op, unsigned long long id) {
  FAKE_LOCKED;
  return d.ordered(op, d.by_id(id)) ? 1 : 0;
}

int fake_begin_capture(unsigned long long id, int mode) {
  FAKE_LOCKED;
  return d.begin_capture(d.by_id(id), static_cast<CUstreamCaptureMode>(mode)) != nullptr ? 1 : 0;
}

int fake_end_capture(unsigned long long id) {
  FAKE_LOCKED;
  return d.end_capture(d.by_id(id)) == CUDA_SUCCESS ? 1 : 0;
}

void fake_set_attribute(int number, int which, int value) {
  FAKE_LOCKED;
  d.attributes[{number, which}] = value;
}

// `seen_from`: what the device with that number is told; -1 for all others.
void fake_set_pointer(unsigned long long ptr, int which, int seen_from, int value) {
  FAKE_LOCKED;
  d.pointers[{ptr, which, seen_from}] = value;
}

// Whether a device has a primary context, which all have at first.
void fake_set_active(int number, int active) {
  FAKE_LOCKED;
  if (active != 0) {
    d.inactive.erase(number);
  } else {
    d.inactive.insert(number);
  }
}

void fake_set_memory(unsigned long long bytes) {
  FAKE_LOCKED;
  d.memory_bytes = bytes;
}

void fake_set_others(unsigned long long bytes) {
  FAKE_LOCKED;
  d.others_bytes = bytes;
}

// The call of `name` after the next `skip` ones fails with `result`.
void fake_fail(const char* name, long skip, int result) {
  FAKE_LOCKED;
  d.faults[name] = {skip, static_cast<CUresult>(result)};
}

void fake_on_call(const char* name, void (*hook)()) {
  FAKE_LOCKED;
  d.hooks[name] = hook;
}

long fake_calls(const char* name) {
  FAKE_LOCKED;
  if (*name != '\0') return d.calls[name];
  long all = 0;
  for (auto& [_, count] : d.calls) all += count;
  return all;
}

// What is there to read since the last clear, as text that stays good until the next call.
const char* fake_trace() {
  FAKE_LOCKED;
  static std::string text;
  text = d.trace;
  return text.c_str();
}

const char* fake_violations() {
  FAKE_LOCKED;
  static std::string text;
  text = d.violations;
  return text.c_str();
}

// For the next test: no capture goes on, and all work has ended.
void fake_reset() {
  FAKE_LOCKED;
  d.finish_all();
  d.forget();
  d.pages.clear();
}

void fake_clear() {
  FAKE_LOCKED;
  d.calls.clear();
  d.trace.clear();
  d.violations.clear();
  d.faults.clear();
  d.hooks.clear();
  d.attributes.clear();
  d.pointers.clear();
  d.inactive.clear();
  d.prefetches.clear();
  d.others_bytes = 0;
  d.hangs = false;
}

}  // extern "C"
