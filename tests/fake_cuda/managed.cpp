// The part of the fake driver about managed memory. More easily offended than the real one may be: every call here loses a
// capture of the stream that it is given, and advice and discard also lose those that an unsafe call loses.
#include <cstdlib>
#include <cstring>

#include "enter.hpp"

using namespace fake;

namespace {

int place_of(const CUmemLocation& location) { return location.type == CU_MEM_LOCATION_TYPE_HOST ? kCpu : location.id; }

CUresult on_stream(Device& d, CUstream handle, const char* name) {
  Stream* stream = d.find(handle);
  if (stream == nullptr) return missing(handle, d);
  if (stream->capture != nullptr) {
    d.lose(stream->capture, name);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (stream->legacy && d.lose_blocking(stream->context, name)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuMemAdvise(CUdeviceptr low, size_t bytes, CUmem_advise advice, CUmemLocation location) {
  return enter("cuMemAdvise", [&](Device& d) {
    if (d.current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (d.unsafe("cuMemAdvise")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return d.pages.advise(low, bytes, advice, place_of(location)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr low, size_t bytes, CUmemLocation location, unsigned, CUstream handle) {
  return enter("cuMemPrefetchAsync", [&](Device& d) {
    const CUresult result = on_stream(d, handle, "cuMemPrefetchAsync");
    if (result != CUDA_SUCCESS) return result;
    d.pages.prefetch(low, bytes, place_of(location), d.memory_bytes);
    const Context* context = d.current();
    d.prefetches.push_back({static_cast<long long>(low), static_cast<long long>(bytes), place_of(location),
                            static_cast<long long>(reinterpret_cast<std::uintptr_t>(handle)),
                            context == nullptr ? -1 : context->device, gil_held()});
    return result;
  });
}

CUresult CUDAAPI cuMemDiscardBatchAsync(CUdeviceptr* lows, size_t* bytes, size_t count, unsigned long long, CUstream handle) {
  return enter("cuMemDiscardBatchAsync", [&](Device& d) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
    if (d.unsafe("cuMemDiscardBatchAsync")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const CUresult result = on_stream(d, handle, "cuMemDiscardBatchAsync");
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; ++i) d.pages.discard(lows[i], bytes[i]);
    return result;
  });
}

CUresult CUDAAPI cuMemHostAlloc(void** ptr, size_t bytes, unsigned) {
  return enter("cuMemHostAlloc", [&](Device& d) {
    if (d.current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (d.unsafe("cuMemHostAlloc")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (gil_held()) d.blame("cuMemHostAlloc with the GIL held");
    *ptr = std::malloc(bytes);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemFreeHost(void* ptr) {
  return enter("cuMemFreeHost", [&](Device& d) {
    if (d.current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (d.unsafe("cuMemFreeHost")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    std::free(ptr);
    return CUDA_SUCCESS;
  });
}

// From where the pages are, which they stay. Into memory that is not pinned it may wait for what is before it on the stream.
CUresult CUDAAPI cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream handle) {
  return enter("cuMemcpyDtoHAsync", [&](Device& d) {
    const CUresult result = on_stream(d, handle, "cuMemcpyDtoHAsync");
    if (result != CUDA_SUCCESS) return result;
    if (gil_held()) d.blame("cuMemcpyDtoHAsync with the GIL held");
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return result;
  });
}

// What the driver knows of the page at `address`: read mostly, preferred, accessors, last prefetch, where, discarded.
void fake_page(unsigned long long address, int* out) {
  FAKE_LOCKED;
  const Page page = d.pages.at(address);
  const int values[] = {page.read_mostly,   page.preferred, static_cast<int>(page.accessors),
                        page.last_prefetch, page.resident,  page.discarded};
  std::copy(std::begin(values), std::end(values), out);
}

// The prefetch with this number since the last clear; 0 if there is none.
int fake_prefetch(long number, long long* out) {
  FAKE_LOCKED;
  if (number >= static_cast<long>(d.prefetches.size())) return 0;
  std::copy(d.prefetches[number].begin(), d.prefetches[number].end(), out);
  return 1;
}

unsigned long long fake_pushed_out(int let_go) {
  FAKE_LOCKED;
  return let_go != 0 ? d.pages.let_go_bytes : d.pages.written_back_bytes;
}

}  // extern "C"
