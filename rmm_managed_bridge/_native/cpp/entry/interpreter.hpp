// The seam to CPython: who holds the GIL, letting go of it and taking it again, pending calls, forks and exit. Nothing else in
// the native code calls the functions of the interpreter that these stand for.
#pragma once

#include <Python.h>
#include <cxxabi.h>

#include "pool/process.hpp"

namespace rmm_bridge {

// The state of this thread while it holds the GIL, else null.
//
// Since Python 3.12 the current state is each thread's own. Before, it is that of whoever holds the GIL, so it has to be this
// thread's. PyGILState_Check is of no use: once a subinterpreter was made it says yes to everybody, for ever (seen on 3.11 to 3.14).
inline PyThreadState* thread_with_gil() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked();
#elif PY_VERSION_HEX >= 0x030C0000
  return _PyThreadState_UncheckedGet();
#else
  PyThreadState* const mine = PyGILState_GetThisThreadState();
  return mine != nullptr && mine == _PyThreadState_UncheckedGet() ? mine : nullptr;
#endif
}

[[noreturn]] void sleep_for_ever() noexcept;

// Around whatever may take the GIL below a function of ours. Once the interpreter is ending, CPython up to 3.13 ends a thread that
// asks for the GIL: by pthread_exit, which unwinds the stack, and a noexcept function in its way is std::terminate. So the thread
// sleeps until the process ends, as CPython 3.14 lets it do by itself. It holds neither the GIL nor a native lock.
template <typename Call>
void sleep_instead_of_ending(Call call) {
  try {
    call();
  } catch (abi::__forced_unwind&) {
    sleep_for_ever();
  }
}

// Puts `call` on the interpreter's list of what its main thread does between two instructions: soon on Python 3.13; before that,
// when the main thread takes the GIL the next time, which may be never (CPython's COMPUTE_EVAL_BREAKER looks at the thread that
// asks: Python/ceval_gil.c). So whoever reports on what the call does must do it first. False if the list is full.
bool call_soon(int (*call)(void*), void* argument) noexcept;

// Connects the process to the interpreter, once. `closed` and `warnings` are called soon after a pool has ended or something was
// noted to warn of; `relieve` is called with the GIL where a request has failed, and has a pending exception set aside.
void connect_interpreter(Process* process, void (*closed)(), void (*warnings)(),
                         bool (*relieve)(std::size_t bytes, int attempt, bool may_collect));

// Interpreter shutdown has begun: no more calls of the driver, and none of Python's. Waits for what the background thread is giving
// back, which may need the GIL (an upstream in Python): lets go of it.
void begin_exit(Process* process);

// What a pool stood on may free managed memory as it goes, on a thread that is in the midst of somebody's capture.
void drop_relaxed(Process* process, PyObject* object);

}  // namespace rmm_bridge
