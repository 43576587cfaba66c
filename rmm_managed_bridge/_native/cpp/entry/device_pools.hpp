// Which pool serves which device, as the entry points look it up.
#pragma once

#include <array>
#include <atomic>

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

using DevicePools = std::array<std::atomic<TrackedPool*>, kDevices>;

}  // namespace rmm_bridge

#define BRIDGE_EXPORT extern "C" __attribute__((visibility("default")))
