#include "entry/interpreter.hpp"

#include <pthread.h>
#include <unistd.h>

#include <chrono>

namespace rmm_bridge {

namespace {

Process* connected = nullptr;
void (*call_closed)() = nullptr;
void (*call_warnings)() = nullptr;
bool (*call_relieve)(std::size_t, int, bool) = nullptr;

void* release_gil() {
  // During shutdown a thread that lets go of the GIL may never get it back.
  if (connected->exiting() || thread_with_gil() == nullptr) return nullptr;
  return PyEval_SaveThread();
}

void restore_gil(void* state) {
  sleep_instead_of_ending([&] { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); });
}

// Not once the end has begun: calls that the background thread leaves behind may come when the modules are empty.
template <auto& Callback>
void soon() {
  call_soon(
      [](void*) {
        if (!connected->exiting()) Callback();
        return 0;
      },
      nullptr);
}

bool relieve(std::size_t bytes, int attempt, bool may_collect) {
  if (thread_with_gil() == nullptr) return false;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  bool again = false;
  sleep_instead_of_ending([&] { again = call_relieve(bytes, attempt, may_collect); });
  PyErr_Restore(type, value, traceback);
  return again;
}

void before_fork() {
  // CUDA has threads of its own, so that Python warns anyway; and what is being given back to a device may take as long as its work.
  if (!connected->driver.loaded) connected->background.rest(std::chrono::milliseconds(100));
  connected->lock_for_fork();
}

void after_fork_in_child() {
  connected->unlock_after_fork();
  connected->forks.become_child();  // before anything reads an array
  connected->background.forget_in_child();
  connected->reading.forget_in_child();
  connected->leave_recording();
  // Without a pool there is nothing of the parent's to keep clear of: the child may start its own.
  if (connected->had_pools() || connected->driver.loaded) connected->become_child();
}

}  // namespace

void sleep_for_ever() noexcept {
  for (;;) ::pause();
}

bool call_soon(int (*call)(void*), void* argument) noexcept { return Py_AddPendingCall(call, argument) == 0; }

void connect_interpreter(Process* process, void (*closed)(), void (*warnings)(), bool (*relieve_python)(std::size_t, int, bool)) {
  connected = process;
  call_closed = closed;
  call_warnings = warnings;
  call_relieve = relieve_python;
  process->release_gil = release_gil;
  process->restore_gil = restore_gil;
  process->on_closed = soon<call_closed>;
  process->on_warning = soon<call_warnings>;
  process->relieve = relieve;
  // A child shares our pages but not our threads. Python's own at-fork hooks would miss forks made by native code.
  pthread_atfork(before_fork, [] { connected->unlock_after_fork(); }, after_fork_in_child);
}

void begin_exit(Process* process) {
  process->begin_exit();
  process->reading.close();
  PyThreadState* const state = PyEval_SaveThread();
  process->background.stop(std::chrono::seconds(5));
  PyEval_RestoreThread(state);
}

void drop_relaxed(Process* process, PyObject* object) {
  const DriverScope scope(process->driver.loaded ? &process->driver : nullptr, nullptr);
  Py_DECREF(object);
}

}  // namespace rmm_bridge
