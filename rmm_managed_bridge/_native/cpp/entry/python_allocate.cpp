#include "entry/python_allocate.hpp"

namespace rmm_bridge {

void* allocate_with_site(TrackedPool* pool, Origin* origin, std::uint8_t framework, Request request, Refusal& refusal,
                         bool* held) noexcept {
  request.who = origin->capture(framework, pool->track());
  return pool->allocate_in_place(request, refusal, nullptr, held);
}

}  // namespace rmm_bridge
