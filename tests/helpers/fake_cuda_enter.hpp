// How every call of the fake driver begins and ends.
#pragma once

#include "fake_cuda_device.hpp"

namespace fake {

inline Device& device() {
  static auto* the = new Device();  // never destroyed: the bridge may call during exit, and a test counts it
  return *the;
}

// Counts the call, takes a fault that a test has placed, and runs a test's hook when the call is over.
template <typename Body>
CUresult enter(const char* name, Body body) {
  Device& d = device();
  CUresult result = CUDA_SUCCESS;
  void (*hook)() = nullptr;
  {
    std::scoped_lock lock(d.mutex);
    ++d.calls[name];
    d.trace += name;
    d.trace += ' ';
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

}  // namespace fake

#define FAKE_LOCKED            \
  fake::Device& d = fake::device(); \
  std::scoped_lock lock(d.mutex)
