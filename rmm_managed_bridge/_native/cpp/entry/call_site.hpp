// Where in the user's program an allocation came from: the innermost Python frame of the program's own, the library's line that it
// went through, and the tag it was made under.
#pragma once

#include <Python.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "entry/code_cache.hpp"
#include "entry/interpreter.hpp"
#include "entry/python_frames.hpp"
#include "ledger/file_rules.hpp"
#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

// For one thread at a time: what guards it, its owner says. `LineProof` and `NameProof` tell code that was seen before by all that
// decides a line, and by whose it is.
template <typename LineProof, typename NameProof>
class CallSites {
 public:
  CallSites(Sites& table, PyInterpreterState* main, const FileRules* rules);

  // What is known of code was known by the rules before.
  void set_rules(const FileRules* rules) noexcept;

  // Sites::kNative where there is no Python frame. Leaves a pending Python error as it is.
  [[gnu::always_inline]] std::uint32_t capture(PyThreadState* thread) noexcept {
    // What proves an answer is good for one interpreter; and another's thread may hold another GIL.
    if (thread->interp != main_) [[unlikely]]
      return capture_uncached(thread);
    // Most of the time it is the innermost frame.
    const std::uint32_t* known = nullptr;
    visit_frames(thread, [&](PyCodeObject* code, int instruction) {
      known = own_.find(code, instruction);
      return true;
    });
    if (known != nullptr) [[likely]]
      return *known;
    return capture_further_out(thread);
  }

 private:
  using LineCache = CodeCache<std::uint32_t, 64, LineProof>;
  struct Pair {
    std::uint32_t site = Sites::kNative, via = Sites::kNative, id = Sites::kNative;
  };

  std::uint32_t capture_further_out(PyThreadState* thread) noexcept;
  std::uint32_t capture_uncached(PyThreadState* thread) noexcept;
  Owner owner_of(PyCodeObject* code) noexcept;
  std::uint32_t line(LineCache& lines, PyCodeObject* code, int instruction, bool library) noexcept;
  std::uint32_t pair(std::uint32_t site, std::uint32_t via) noexcept;

  Sites& table_;
  const FileRules* rules_;
  PyInterpreterState* const main_;
  LineCache own_;    // of the program's code alone: found without a walk
  LineCache other_;  // of libraries, and of generated code
  CodeCache<Owner, 128, NameProof> owners_;
  std::array<Pair, 128> pairs_{};
};

// Who asks for memory, as far as this thread may look: tags need the GIL.
class Origin {
 public:
  explicit Origin(Process* process);

  const Process* process;
  // The newest are in use. Those before stay, since a thread without the GIL may be reading them.
  std::vector<std::unique_ptr<const FileRules>> rules;
  std::atomic<const FileRules*> newest_rules{nullptr};
  CallSites<CodeIdentity, CodeIdentity> sites;  // of threads that hold the GIL
  bool tags_used = false;                       // set for ever by the first tag: asking a context for what it has not is 100 ns
  PyObject* tag_variable = nullptr;             // a ContextVar of ints; what the ints mean, Python knows

  static bool holds_gil() noexcept { return thread_with_gil() != nullptr; }

  // Who frees. That is asked where something is wrong with a free, so without the GIL it is not worth a walk.
  Provenance freeing(std::uint8_t framework, Track track) noexcept {
    if (holds_gil()) return capture(framework, track);
    Provenance who;
    who.framework = framework;
    return who;
  }

  Provenance capture(std::uint8_t framework, Track track) noexcept {
    Provenance who;
    who.framework = framework;
    // After the interpreter has ended nobody may ask it for the state of a thread.
    if (track == Track::off || !process->running()) return who;
    PyThreadState* const thread = thread_with_gil();
    if (thread == nullptr) {
      if (track == Track::sites) who.site = site_without_gil();
      return who;
    }
    PyObject* tag = nullptr;
    if (tags_used && PyContextVar_Get(tag_variable, nullptr, &tag) == 0 && tag != nullptr) {
      who.tag = static_cast<std::uint32_t>(PyLong_AsLong(tag));
      Py_DECREF(tag);
    }
    if (track == Track::sites) {
      who.site = sites.capture(thread);
      if (who.site == Sites::kNative) [[unlikely]]
        who.site = native_thread();
    }
    return who;
  }

 private:
  // Of this thread's own frames (docs/design/call_sites.md): takes no reference, calls nothing of Python's, waits for nobody who may
  // wait for the GIL.
  std::uint32_t site_without_gil() noexcept;
  // The name of a thread that runs no Python, if it has one of its own.
  std::uint32_t native_thread() noexcept;

  Process& process_;
  PyInterpreterState* const main_;
};

Origin* new_origin(Process* process, PyObject* tag_variable);

// Prefixes of file names, as FileRules has them.
void set_rules(Origin* origin, const std::vector<std::string>& program, const std::vector<std::string>& library,
               const std::vector<std::string>& hidden);

// Null with a Python error set.
PyObject* new_str(const Text& text);

}  // namespace rmm_bridge
