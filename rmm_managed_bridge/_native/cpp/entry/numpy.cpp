#include "entry/numpy.hpp"

#include <utility>

namespace rmm_bridge {

using Entries = NumpyEntries<NumpyPythonState>;

void* numpy_malloc(void* context, std::size_t bytes) noexcept { return Entries::malloc(context, bytes); }
void* numpy_calloc(void* context, std::size_t count, std::size_t each) noexcept { return Entries::calloc(context, count, each); }
void* numpy_realloc(void* context, void* ptr, std::size_t bytes) noexcept { return Entries::realloc(context, ptr, bytes); }
void numpy_free(void* context, void* ptr, std::size_t bytes) noexcept { Entries::free(context, ptr, bytes); }

RefusedRequest take_refused_request() noexcept { return std::exchange(refused_request, {}); }

}  // namespace rmm_bridge
