// The C functions that CuPy calls for each block.
#pragma once

#include <Python.h>

#include "entry/call_site.hpp"
#include "entry/device_pools.hpp"

namespace rmm_bridge {

struct CupyState {
  Process* process = nullptr;
  Origin* origin = nullptr;
  std::uint8_t framework = 0;
  DevicePools pools{};
  // CuPy's own, private C function, if it has the signature that we know; then no Python runs for a stream we hold.
  std::intptr_t (*current_stream)() = nullptr;
  PyObject* ask_stream = nullptr;   // ask_stream(device) -> handle, where the function above is null
  PyObject* hold_stream = nullptr;  // hold_stream(handle, device): a stream seen for the first time
  PyObject* refuse = nullptr;       // refuse(handle, refusal, bytes, device) raises
  PyObject* hint = nullptr;         // hint(ptr, bytes, handle): a new block that a hint policy may want placed
};

}  // namespace rmm_bridge

// Both are called with the GIL held. CuPy takes what malloc returns as it is: null would become an array at address 0,
// and the next kernel would kill the context. So a failure is a Python error *and* a C++ exception, which Cython turns
// into the error that is set. Seen with CuPy 14.2.
BRIDGE_EXPORT void* bridge_cupy_malloc(void* param, std::size_t bytes, int device);
BRIDGE_EXPORT void bridge_cupy_free(void* param, void* ptr, int device);
