// The Python frames of this thread from the innermost outwards, without making frame objects: those cost 100 ns each.
//
// Python has no public way from a frame to the one that called it but through frame objects. So CPython's own header is read,
// as Cython does for its line numbers, for the versions whose layout is known; it is the interpreter's that this is compiled
// for. Any other version goes through frame objects.
#pragma once

#include <Python.h>

#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define BRIDGE_READS_FRAMES 1
#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE 1
#define BRIDGE_DEFINED_CORE 1
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#include <internal/pycore_frame.h>
#pragma GCC diagnostic pop
#ifdef BRIDGE_DEFINED_CORE
#undef Py_BUILD_CORE
#undef BRIDGE_DEFINED_CORE
#endif
#endif

namespace rmm_bridge {

// Calls `visit(code, instruction)` until it returns true; `instruction` is an offset as PyCode_Addr2Line takes it. True if it
// did. The references are borrowed: while `visit` runs no Python, and this thread is in a C call, its frames stay. Where they are read
// through frame objects, with the GIL only.
#ifdef BRIDGE_READS_FRAMES
template <typename Visit>
[[gnu::always_inline]] inline bool visit_frames(PyThreadState* thread, Visit visit) {
#if PY_VERSION_HEX >= 0x030D0000
  _PyInterpreterFrame* frame = thread->current_frame;
#else
  _PyInterpreterFrame* frame = thread->cframe->current_frame;
#endif
  for (; frame != nullptr; frame = frame->previous) {
    if (_PyFrame_IsIncomplete(frame)) continue;  // one that C called Python from, or that is being set up
#if PY_VERSION_HEX >= 0x030D0000
    auto* code = reinterpret_cast<PyCodeObject*>(frame->f_executable);
#else
    PyCodeObject* code = frame->f_code;
#endif
    if (visit(code, static_cast<int>(_PyInterpreterFrame_LASTI(frame) * sizeof(_Py_CODEUNIT)))) return true;
  }
  return false;
}
#else
template <typename Visit>
bool visit_frames(PyThreadState* thread, Visit visit) {
  PyFrameObject* frame = PyThreadState_GetFrame(thread);
  bool done = false;
  while (frame != nullptr && !done) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    done = visit(code, PyFrame_GetLasti(frame));
    Py_DECREF(code);
    PyFrameObject* back = done ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  return done;
}
#endif

}  // namespace rmm_bridge
