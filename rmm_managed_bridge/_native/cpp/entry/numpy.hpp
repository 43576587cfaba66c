// NumPy's data-memory handler with call sites: what the interpreter has to do with it.
#pragma once

#include "entry/call_site.hpp"
#include "entry/numpy_state.hpp"

namespace rmm_bridge {

using NumpyPythonState = NumpyState<Origin>;

// As NumPy calls them; the context is a NumpyPythonState.
void* numpy_malloc(void* context, std::size_t bytes) noexcept;
void* numpy_calloc(void* context, std::size_t count, std::size_t each) noexcept;
void* numpy_realloc(void* context, void* ptr, std::size_t bytes) noexcept;
void numpy_free(void* context, void* ptr, std::size_t bytes) noexcept;

RefusedRequest take_refused_request() noexcept;

}  // namespace rmm_bridge
