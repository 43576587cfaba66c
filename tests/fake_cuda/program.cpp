// The part of the fake driver that programs call and the bridge does not: captures and graphs, managed memory, and the
// calls that the bridge keeps from because they lose captures (tests/fake_cuda/facts.py).
#include <cstdlib>

#include "enter.hpp"

using namespace fake;

extern "C" {

CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
  return enter("cuStreamDestroy", [&](Device& d) {
    Stream* stream = d.find(handle);
    if (stream == nullptr || stream->handle == 0) return CUDA_ERROR_INVALID_HANDLE;
    d.destroy(stream);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
  return enter("cuStreamSynchronize", [&](Device& d) {
    Stream* stream = d.find(handle);
    if (stream == nullptr) return missing(handle, d);
    if (stream->capture != nullptr) {
      d.lose(stream->capture, "a wait for its stream");
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream->legacy && d.lose_blocking(stream->context, "a wait for the legacy stream")) {
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (d.unsafe("cuStreamSynchronize")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return wait_on_host(d, d.front_of(stream), "cuStreamSynchronize");
  });
}

CUresult CUDAAPI cuCtxRecordEvent(CUcontext context, CUevent event) {
  return enter("cuCtxRecordEvent", [&](Device& d) {
    auto* of = reinterpret_cast<Context*>(context);
    if (d.lose_all(of, "cuCtxRecordEvent")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    *reinterpret_cast<Event*>(event) = {of, d.everything(of), nullptr};
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  return enter("cuStreamBeginCapture", [&](Device& d) {
    Stream* stream = d.find(handle);
    if (stream == nullptr) return missing(handle, d);
    return d.begin_capture(stream, mode) == nullptr ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  return enter("cuStreamEndCapture", [&](Device& d) {
    Stream* stream = d.find(handle);
    if (stream == nullptr) return missing(handle, d);
    const CUresult result = d.end_capture(stream);
    *graph = result == CUDA_SUCCESS ? reinterpret_cast<CUgraph>(new char) : nullptr;
    return result;
  });
}

CUresult CUDAAPI cuGraphCreate(CUgraph* graph, unsigned) {
  return enter("cuGraphCreate", [&](Device&) {
    *graph = reinterpret_cast<CUgraph>(new char);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuGraphDestroy(CUgraph graph) {
  return enter("cuGraphDestroy", [&](Device&) {
    delete reinterpret_cast<char*>(graph);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec* executable, CUgraph, unsigned long long) {
  return enter("cuGraphInstantiate", [&](Device& d) {
    if (d.unsafe("cuGraphInstantiate")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    *executable = reinterpret_cast<CUgraphExec>(new char);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec executable) {
  return enter("cuGraphExecDestroy", [&](Device&) {
    delete reinterpret_cast<char*>(executable);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr* ptr, size_t bytes, unsigned) {
  return enter("cuMemAllocManaged", [&](Device& d) {
    if (d.current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (d.unsafe("cuMemAllocManaged")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const std::size_t page = d.pages.page_bytes;
    *ptr = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(page, (bytes + page - 1) / page * page));
    d.pointers[{*ptr, CU_POINTER_ATTRIBUTE_IS_MANAGED, -1}] = 1;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemFree(CUdeviceptr ptr) {
  return enter("cuMemFree", [&](Device& d) {
    if (d.current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (d.unsafe("cuMemFree")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (d.pointers.erase({ptr, CU_POINTER_ATTRIBUTE_IS_MANAGED, -1}) == 0) return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = wait_on_host(d, d.everything(d.current()), "cuMemFree");
    std::free(reinterpret_cast<void*>(ptr));
    return result;
  });
}

}  // extern "C"
