// The C functions that CuPy and PyTorch call for each block.
#pragma once

#include <Python.h>

#include <array>
#include <stdexcept>

#include "entry/call_site.hpp"
#include "pool/tracked_pool.hpp"

#define BRIDGE_EXPORT extern "C" __attribute__((visibility("default")))

namespace rmm_bridge {

inline constexpr int kDevices = 64;

using DeviceHeaps = std::array<std::atomic<Heap*>, kDevices>;

struct CupyGuest {
  Process* process = nullptr;
  Origin* origin = nullptr;
  std::uint8_t framework = 0;
  DeviceHeaps heaps{};
  // CuPy's own, private C function, if it has the signature that we know; then no Python runs for a stream we hold.
  std::intptr_t (*current_stream)() = nullptr;
  PyObject* ask_stream = nullptr;  // ask_stream(device) -> handle, where the function above is null
  PyObject* hold_stream = nullptr;  // hold_stream(handle, device): a stream seen for the first time
  PyObject* refuse = nullptr;       // refuse(handle, refusal, bytes, device) raises
  PyObject* hint = nullptr;         // hint(ptr, bytes, handle): a new block that a hint policy may want placed
};

// One for the process: PyTorch's functions take no parameter of ours.
struct TorchGuest {
  Process* process = nullptr;
  Origin* origin = nullptr;
  std::uint8_t framework = 0;
  DeviceHeaps heaps{};
  PyObject* hold_stream = nullptr;  // as above, called from the interpreter's main loop
  std::atomic<bool> holding{false};  // a call of it is on its way
};

TorchGuest& torch_guest();

}  // namespace rmm_bridge

// Both are called with the GIL held. CuPy takes what malloc returns as it is: null would become an array at address 0,
// and the next kernel would kill the context. So a failure is a Python error *and* a C++ exception, which Cython turns
// into the error that is set. Seen with CuPy 14.2.
BRIDGE_EXPORT void* bridge_cupy_malloc(void* param, std::size_t bytes, int device);
BRIDGE_EXPORT void bridge_cupy_free(void* param, void* ptr, int device);

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
