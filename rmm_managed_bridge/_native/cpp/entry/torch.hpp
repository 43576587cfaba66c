// The C functions that PyTorch calls for each block.
#pragma once

#include <Python.h>

#include <atomic>

#include "entry/call_site.hpp"
#include "entry/device_pools.hpp"

namespace rmm_bridge {

// One for the process: PyTorch's functions take no parameter of ours.
struct TorchState {
  Process* process = nullptr;
  Origin* origin = nullptr;
  std::uint8_t framework = 0;
  DevicePools pools{};
  PyObject* hold_stream =
      nullptr;  // hold_stream(handle, device): a stream seen for the first time; called from the interpreter's main loop
  std::atomic<bool> holding{false};  // a call of it is on its way
};

TorchState& torch_state();

}  // namespace rmm_bridge

// Called from any thread, mostly without the GIL, and by `torch.cuda.MemPool` under PyTorch's own lock: none of these takes
// the GIL or collects garbage, which would free tensors in the middle of an allocation. So a block has no call site and no
// tag where PyTorch has let go of the GIL, as it does for every operation on tensors.
//
// PyTorch's pluggable allocator takes a null pointer as memory, as CuPy does, and turns a C++ exception into a
// RuntimeError with its text: `bridge_torch_malloc` throws. A `MemPool` takes null as "out of memory", frees what it
// keeps, asks once more, and raises torch.OutOfMemoryError: `bridge_torch_pool_malloc` returns null for that reason, and
// throws for the others.
BRIDGE_EXPORT void* bridge_torch_malloc(std::size_t bytes, int device, CUstream stream);
BRIDGE_EXPORT void* bridge_torch_pool_malloc(std::size_t bytes, int device, CUstream stream);
// `stream` is the one that malloc was called with, and may be gone by now.
BRIDGE_EXPORT void bridge_torch_free(void* ptr, std::size_t bytes, int device, CUstream stream);
// For Tensor.record_stream.
BRIDGE_EXPORT void bridge_torch_record_stream(void* ptr, CUstream stream);
