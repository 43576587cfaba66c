// How every call of the fake driver begins and ends.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "device.hpp"

namespace fake {

inline Device& device() {
  static auto* the = new Device();  // never destroyed: the bridge may call during exit, and a test counts it
  return *the;
}

inline bool gil_held() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check() == 1;
}

// What enqueues something takes as long as the stream's queue is full, and what frees memory as long as the device works. A Python
// function on a stream then waits for the GIL that its caller holds.
inline bool may_block(std::string_view name) {
  static constexpr std::array<std::string_view, 7> kNames{"cuEventRecord",      "cuStreamWaitEvent", "cuEventSynchronize",
                                                          "cuCtxSynchronize",   "cuMemFree",         "cuMemPrefetchAsync",
                                                          "cuStreamSynchronize"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

// Counts the call, takes a fault that a test has placed, and runs a test's hook when the call is over.
template <typename Body>
CUresult enter(const char* name, Body body) {
  Device& d = device();
  CUresult result = CUDA_SUCCESS;
  void (*hook)() = nullptr;
  const bool holds_gil = may_block(name) && gil_held();
  {
    std::scoped_lock lock(d.mutex);
    ++d.calls[name];
    d.trace += name;
    d.trace += ' ';
    if (in_host_function && std::string_view(name) != "cuCtxGetCurrent") d.blame(std::string(name) + " in a host function");
    if (holds_gil) d.blame(std::string(name) + " with the GIL held");
    bool faulty = false;
    if (auto fault = d.faults.find(name); fault != d.faults.end() && fault->second.skip-- == 0) {
      faulty = true;
      result = fault->second.result;
      d.faults.erase(fault);
    }
    if (!faulty) result = body(d);
    if (auto found = d.hooks.find(name); found != d.hooks.end()) {
      hook = found->second;
      d.hooks.erase(found);
    }
  }
  if (hook != nullptr) hook();
  return result;
}

inline CUresult missing(CUstream handle, Device& d) {
  const bool ambient = handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD;
  if (!ambient) d.blame("a destroyed stream's handle was used");
  return ambient ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
}

// Ends what the nodes stand for, as waiting for the device does. With the GIL held, a Python function on a stream
// never ends, and neither does the wait: reported here instead.
inline CUresult wait_on_host(Device& d, const Front& nodes, const char* name) {
  const bool open = std::any_of(nodes.begin(), nodes.end(), [](const NodeRef& node) { return !node->done; });
  if (open && gil_held()) {
    d.blame(std::string(name) + " waits with the GIL held" +
            (d.needs_host(nodes) ? ", and a Python function is queued: a deadlock" : ""));
    if (d.needs_host(nodes)) return CUDA_ERROR_UNKNOWN;
  }
  for (const NodeRef& node : nodes) d.finish(node.get());
  return CUDA_SUCCESS;
}

}  // namespace fake

#define FAKE_LOCKED                 \
  fake::Device& d = fake::device(); \
  std::scoped_lock lock(d.mutex)
