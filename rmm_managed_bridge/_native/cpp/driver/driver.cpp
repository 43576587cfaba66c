#include "driver/driver.hpp"

#include <dlfcn.h>

namespace rmm_bridge {

void Driver::load(const char* library) {
  if (loaded) return;
  void* handle = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    why_not = std::string("no CUDA driver: ") + library + " cannot be loaded";
    return;
  }
#define BRIDGE_LOOK_UP(name, declaration, symbol)                             \
  name = reinterpret_cast<decltype(name)>(dlsym(handle, symbol));             \
  if (name == nullptr) {                                                      \
    why_not = std::string("the CUDA driver is too old: it has no ") + symbol; \
    return;                                                                   \
  }
  BRIDGE_DRIVER_FUNCTIONS(BRIDGE_LOOK_UP)
#undef BRIDGE_LOOK_UP
  if (CUresult result = init(0); result != CUDA_SUCCESS) {
    why_not = "the CUDA driver does not start: " + name_of(result);
    return;
  }
  loaded = true;
  if (device_count(&devices) != CUDA_SUCCESS) devices = 0;
  if (devices == 0) why_not = "the CUDA driver sees no device";
}

std::string Driver::name_of(CUresult result) const {
  const char* name = nullptr;
  if (error_name == nullptr || error_name(result, &name) != CUDA_SUCCESS || name == nullptr) {
    return "CUresult " + std::to_string(static_cast<int>(result));
  }
  return name;
}

std::size_t Driver::total_memory() const {
  std::size_t sum = 0;
  for (int device = 0; loaded && device < devices; ++device) {
    std::size_t bytes = 0;
    if (device_memory(&bytes, device) == CUDA_SUCCESS) sum += bytes;
  }
  return sum;
}

int Driver::attribute(int device, int which) const {
  int value = 0;
  if (!loaded || device_attribute(&value, static_cast<CUdevice_attribute>(which), device) != CUDA_SUCCESS) return 0;
  return value;
}

}  // namespace rmm_bridge
