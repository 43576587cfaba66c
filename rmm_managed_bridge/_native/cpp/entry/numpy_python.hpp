// NumPy's data-memory handler with call sites: what the interpreter has to do with it.
#pragma once

#include <Python.h>

#include <utility>

#include "entry/call_site.hpp"
#include "entry/numpy.hpp"

namespace rmm_bridge {

using PythonGuest = NumpyGuest<Origin>;
using PythonEntries = NumpyEntries<PythonGuest>;

inline RefusedRequest take_refused_request() { return std::exchange(refused_request, {}); }

}  // namespace rmm_bridge
