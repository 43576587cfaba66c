// Where in the user's program an allocation came from: the first Python frame outside the bridge and the frameworks,
// and the tag it was made under.
//
// Everything here needs the GIL; that is also what guards the tables.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "entry/interpreter.hpp"
#include "entry/python_frames.hpp"
#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

struct SiteKey {
  PyCodeObject* code = nullptr;
  int instruction = 0;
  bool operator==(const SiteKey&) const = default;
};
struct SiteKeyHash {
  std::size_t operator()(const SiteKey& key) const noexcept {
    return ((reinterpret_cast<std::uintptr_t>(key.code) >> 4) + static_cast<unsigned>(key.instruction)) * 0x9E3779B97F4A7C15ull;
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
    recent_codes_ = {};
    recent_sites_ = {};
  }

  // kNative where there is no Python frame of the user's. Leaves a pending Python error as it is.
  std::uint32_t capture(PyThreadState* thread) noexcept {
    try {
      std::uint32_t site = kNative;
      visit_frames(thread, [&](PyCodeObject* code, int instruction) {
        const SiteKey key{code, instruction};
        Recent<SiteKey, std::uint32_t>& recent = recent_sites_[SiteKeyHash{}(key) >> kRecentShift];
        if (recent.key != key) {
          if (internal(code)) return false;
          recent = {key, intern(key)};  // the table keeps the code
        }
        site = recent.value;
        return true;
      });
      return site;
    } catch (const std::bad_alloc&) {
      return kNative;
    }
  }

  const Site& at(std::uint32_t site) const { return sites_[site]; }

 private:
  static constexpr std::size_t kRecent = 64;
  static constexpr unsigned kRecentShift = 64 - 6;

  template <typename Key, typename Value>
  struct Recent {
    Key key{};
    Value value{};
  };

  bool internal(PyCodeObject* code) {
    Recent<PyCodeObject*, bool>& recent = recent_codes_[SiteKeyHash{}({code, 0}) >> kRecentShift];
    if (recent.key == code) return recent.value;
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
    recent = {code, found->second};
    return found->second;
  }

  [[gnu::noinline]] std::uint32_t intern(const SiteKey& key) {
    auto found = index_.find(key);
    if (found == index_.end()) {
      if (sites_.size() >= kLimit) return kNative;
      sites_.push_back({key.code, PyCode_Addr2Line(key.code, key.instruction)});
      found = index_.emplace(key, static_cast<std::uint32_t>(sites_.size() - 1)).first;
    }
    return found->second;
  }

  std::vector<std::string> prefixes_;
  std::unordered_map<PyCodeObject*, bool> codes_;
  std::unordered_map<SiteKey, std::uint32_t, SiteKeyHash> index_;
  std::vector<Site> sites_{Site{}};
  // A program allocates at a few places again and again: no look-up in a table for those.
  std::array<Recent<SiteKey, std::uint32_t>, kRecent> recent_sites_{};
  std::array<Recent<PyCodeObject*, bool>, kRecent> recent_codes_{};
};

// Who asks for memory, as far as this thread may look: site and tag need the GIL.
class Origin {
 public:
  explicit Origin(const Process* process) : process(process) {}

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
void site_parts(Origin* origin, std::uint32_t site, PyObject** code, int* line);

}  // namespace rmm_bridge
