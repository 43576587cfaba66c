// Where in the user's program an allocation came from: the first Python frame outside the bridge and the frameworks,
// and the tag it was made under.
//
// Everything here needs the GIL; that is also what guards the tables.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "heap.hpp"

namespace rmm_bridge {

struct SiteKey {
  PyCodeObject* code;
  int instruction;
  bool operator==(const SiteKey&) const = default;
};
struct SiteKeyHash {
  std::size_t operator()(const SiteKey& key) const noexcept {
    return (reinterpret_cast<std::uintptr_t>(key.code) >> 4) * 0x9E3779B97F4A7C15ull + static_cast<unsigned>(key.instruction);
  }
};

struct Site {
  PyCodeObject* code = nullptr;
  int line = 0;
};

class CallSites {
 public:
  static constexpr std::uint32_t kNative = 0;
  // A program that makes code without end (one code object a notebook cell is nowhere near): later sites are "native".
  static constexpr std::size_t kLimit = std::size_t{1} << 20;

  // Files below one of these are not the user's.
  void set_internal(std::vector<std::string> prefixes) {
    prefixes_ = std::move(prefixes);
    codes_.clear();  // their references stay: see `internal`
    last_code_ = nullptr;
  }

  // kNative where there is no Python frame of the user's. Leaves a pending Python error as it is.
  std::uint32_t capture(PyThreadState* thread) noexcept {
    try {
      std::uint32_t site;
      return innermost(thread, site) ? site : walk();
    } catch (const std::bad_alloc&) {
      return kNative;
    }
  }

  const Site& at(std::uint32_t site) const { return sites_[site]; }

 private:
#if PY_VERSION_HEX >= 0x030D0000
  static _PyInterpreterFrame* frame_of(PyThreadState* thread) { return thread->current_frame; }
#elif PY_VERSION_HEX >= 0x030C0000
  static _PyInterpreterFrame* frame_of(PyThreadState* thread) { return thread->cframe->current_frame; }
#endif

  // Most allocations come straight from the user's own function. Then the innermost frame is enough, and reading it in
  // place saves making a frame object for each call (100 ns). The accessors are PyUnstable_* since Python 3.12.
  bool innermost(PyThreadState* thread, std::uint32_t& site) {
#if PY_VERSION_HEX >= 0x030C0000
    _PyInterpreterFrame* frame = frame_of(thread);
    if (frame == nullptr) return false;
    PyObject* code = PyUnstable_InterpreterFrame_GetCode(frame);
    const SiteKey key{reinterpret_cast<PyCodeObject*>(code), PyUnstable_InterpreterFrame_GetLasti(frame)};
    bool found = key == last_key_;  // whose code the table keeps: a program allocates at one place again and again
    if (found) {
      site = last_site_;
    } else if (PyCode_Check(code) && !internal(key.code)) {
      found = true;
      site = intern(key.code, key.instruction);
    }
    Py_DECREF(code);
    return found;
#else
    static_cast<void>(thread);
    static_cast<void>(site);
    return false;
#endif
  }

  std::uint32_t walk() {
    PyFrameObject* frame = PyEval_GetFrame();
    if (frame == nullptr) return kNative;
    Py_INCREF(frame);
    std::uint32_t site = kNative;
    while (frame != nullptr) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      if (!internal(code)) {
        site = intern(code, PyFrame_GetLasti(frame));
        Py_DECREF(code);
        break;
      }
      Py_DECREF(code);
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    Py_XDECREF(frame);
    return site;
  }

  bool internal(PyCodeObject* code) {
    if (code == last_code_) return last_internal_;
    auto [found, fresh] = codes_.try_emplace(code, false);
    if (fresh) {
      // The table's own reference: a dead code object's address could come back as somebody else's code.
      Py_INCREF(code);
      Py_ssize_t length = 0;
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);
      const char* file = PyUnicode_AsUTF8AndSize(code->co_filename, &length);
      PyErr_Restore(type, value, traceback);
      if (file != nullptr) {
        const std::string_view name(file, static_cast<std::size_t>(length));
        for (const std::string& prefix : prefixes_) found->second = found->second || name.starts_with(prefix);
      }
    }
    last_code_ = code;
    return last_internal_ = found->second;
  }

  std::uint32_t intern(PyCodeObject* code, int instruction) {
    const SiteKey key{code, instruction};
    if (key == last_key_) return last_site_;
    auto found = index_.find(key);
    if (found == index_.end()) {
      if (sites_.size() >= kLimit) return kNative;
      sites_.push_back({code, PyCode_Addr2Line(code, instruction)});
      found = index_.emplace(key, static_cast<std::uint32_t>(sites_.size() - 1)).first;
    }
    last_key_ = key;
    return last_site_ = found->second;
  }

  std::vector<std::string> prefixes_;
  std::unordered_map<PyCodeObject*, bool> codes_;
  std::unordered_map<SiteKey, std::uint32_t, SiteKeyHash> index_;
  std::vector<Site> sites_{Site{}};
  PyCodeObject* last_code_ = nullptr;
  bool last_internal_ = false;
  SiteKey last_key_{nullptr, 0};
  std::uint32_t last_site_ = kNative;
};

// Who asks for memory, as far as this thread may look: site and tag need the GIL.
class Origin {
 public:
  explicit Origin(const Process* process) : process(process) {}

  const Process* process;
  CallSites sites;
  bool tags_used = false;  // set for ever by the first tag: asking a context for what it has not is 100 ns
  PyObject* tag_variable = nullptr;  // a ContextVar of ints; what the ints mean, Python knows

  // The state of this thread while it holds the GIL, else null. Since Python 3.12 the current one is each thread's own.
  static PyThreadState* holder() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
    return PyThreadState_GetUnchecked();
#elif PY_VERSION_HEX >= 0x030C0000
    return _PyThreadState_UncheckedGet();
#else
    return PyGILState_Check() ? PyThreadState_Get() : nullptr;
#endif
  }
  static bool holds_gil() noexcept { return holder() != nullptr; }

  Provenance capture(std::uint8_t framework, Track track) noexcept {
    Provenance who;
    who.framework = framework;
    // After the interpreter has ended PyGILState_Check says yes to everybody, and the next call aborts.
    if (track == Track::off || !process->running()) return who;
    PyThreadState* const thread = holder();
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

}  // namespace rmm_bridge
