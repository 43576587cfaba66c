// An allocation for a caller that has its place in the program looked up: one call from a module to this library.
#pragma once

#include "entry/call_site.hpp"
#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

// As TrackedPool::allocate. `who` of `request` is filled in, with the call site and the tag where this thread holds the GIL.
void* allocate_with_site(TrackedPool* pool, Origin* origin, std::uint8_t framework, Request request, Refusal& refusal,
                         bool* held = nullptr) noexcept;

}  // namespace rmm_bridge
