// Where in the user's program an allocation came from: the first Python frame outside the bridge and the frameworks,
// and the tag it was made under.
//
// Everything here needs the GIL; that is also what guards the caches. The table behind them has a lock of its own.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "entry/code_cache.hpp"
#include "entry/interpreter.hpp"
#include "entry/python_frames.hpp"
#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

class CallSites {
 public:
  explicit CallSites(Sites& table);

  // Files whose names begin with one of these are not the user's. As UTF-32, with lone surrogates for bytes that are no text.
  void set_internal(std::vector<std::string> prefixes) noexcept;

  // Sites::kNative where there is no Python frame of the user's. Leaves a pending Python error as it is.
  [[gnu::always_inline]] std::uint32_t capture(PyThreadState* thread) noexcept {
    // What proves an answer is good for one interpreter; and another's thread may hold another GIL.
    if (thread->interp != main_) [[unlikely]]
      return capture_uncached(thread);
    std::uint32_t site = Sites::kNative;
    visit_frames(thread, [&](PyCodeObject* code, int instruction) {
      if (const std::uint32_t* known = sites_.find(code, instruction); known != nullptr) [[likely]] {
        site = *known;
        return true;
      }
      const bool* internal = internal_codes_.find(code, 0);
      if (internal != nullptr ? *internal : learn_internal(code)) return false;
      site = learn_site(code, instruction);
      return true;
    });
    return site;
  }

 private:
  bool is_internal(const PyCodeObject* code) const noexcept;
  std::uint32_t intern(PyCodeObject* code, int instruction) noexcept;
  bool learn_internal(PyCodeObject* code) noexcept;
  std::uint32_t learn_site(PyCodeObject* code, int instruction) noexcept;
  std::uint32_t capture_uncached(PyThreadState* thread) noexcept;

  Sites& table_;
  PyInterpreterState* const main_;
  std::vector<std::string> prefixes_;
  CodeCache<std::uint32_t, 64> sites_;
  CodeCache<bool, 32> internal_codes_;
};

// Who asks for memory, as far as this thread may look: site and tag need the GIL.
class Origin {
 public:
  explicit Origin(Process* process) : process(process), sites(process->sites) {}

  const Process* process;
  CallSites sites;
  bool tags_used = false;            // set for ever by the first tag: asking a context for what it has not is 100 ns
  PyObject* tag_variable = nullptr;  // a ContextVar of ints; what the ints mean, Python knows

  static bool holds_gil() noexcept { return thread_with_gil() != nullptr; }

  Provenance capture(std::uint8_t framework, Track track) noexcept {
    Provenance who;
    who.framework = framework;
    // After the interpreter has ended nobody may ask it for the state of a thread.
    if (track == Track::off || !process->running()) return who;
    PyThreadState* const thread = thread_with_gil();
    if (thread == nullptr) return who;
    PyObject* tag = nullptr;
    if (tags_used && PyContextVar_Get(tag_variable, nullptr, &tag) == 0 && tag != nullptr) {
      who.tag = static_cast<std::uint32_t>(PyLong_AsLong(tag));
      Py_DECREF(tag);
    }
    if (track == Track::sites) who.site = sites.capture(thread);
    return who;
  }
};

Origin* new_origin(Process* process, PyObject* tag_variable);
void set_internal(Origin* origin, std::vector<std::string> prefixes);

// Null with a Python error set.
PyObject* new_str(const Text& text);

}  // namespace rmm_bridge
