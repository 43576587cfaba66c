// What is read of a code object: its names, the line of an instruction, and whether it is the one that was seen before.
//
// Only what is fixed when the object is made is read, and nothing of it is counted, cached or called: so a thread may read the code
// of its own frames also without the GIL (docs/design/call_sites.md).
#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "entry/python_frames.hpp"
#include "ledger/sites.hpp"

namespace rmm_bridge {

// The characters of a str where they lie.
[[gnu::always_inline]] inline Text text_of(PyObject* text) noexcept {
  if (!PyUnicode_Check(text)) return {};
#if PY_VERSION_HEX < 0x030C0000
  if (!PyUnicode_IS_READY(text)) return {};
#endif
  const int width = PyUnicode_KIND(text);
  return {{static_cast<const char*>(PyUnicode_DATA(text)), static_cast<std::size_t>(PyUnicode_GET_LENGTH(text) * width)}, width};
}

// As PyCode_Addr2Line, which is of no use without the GIL: it reads what tracing by other threads makes. -1: the instruction has none.
#ifdef BRIDGE_READS_FRAMES
// `decided`: so many bytes of the table decide it.
inline int line_of(const PyCodeObject* code, int instruction, std::size_t* decided = nullptr) noexcept {
  // Entries of a first byte 1kkkklll (kind, code units - 1) and bytes below 0x80: Objects/locations.md of CPython.
  constexpr int kShort = 10, kShortest = 12, kNoColumns = 13, kLong = 14, kNoLine = 15;
  const auto* const start = reinterpret_cast<const unsigned char*>(PyBytes_AS_STRING(code->co_linetable));
  const unsigned char* const end = start + PyBytes_GET_SIZE(code->co_linetable);
  const unsigned char* at = start;
  const int unit = instruction / static_cast<int>(sizeof(_Py_CODEUNIT));
  int line = code->co_firstlineno;
  for (int next = 0; at < end;) {
    const int kind = (*at >> 3) & 15;
    next += (*at++ & 7) + 1;
    if (kind == kNoColumns || kind == kLong) {
      unsigned value = 0;
      for (unsigned shift = 0; at < end; shift += 6) {
        const unsigned char byte = *at++;
        value |= static_cast<unsigned>(byte & 63) << shift;
        if ((byte & 64) == 0) break;
      }
      const int steps = static_cast<int>(value >> 1);
      line += (value & 1) != 0 ? -steps : steps;
    } else if (kind >= kShort && kind <= kShortest) {
      line += kind - kShort;
    }
    if (unit < next) {
      if (decided != nullptr) *decided = static_cast<std::size_t>(at - start);
      return kind == kNoLine ? -1 : line;
    }
    while (at < end && (*at & 0x80) == 0) ++at;
  }
  if (decided != nullptr) *decided = static_cast<std::size_t>(end - start);
  return -1;
}
#else
inline int line_of(PyCodeObject* code, int instruction) noexcept { return PyCode_Addr2Line(code, instruction); }
#endif

// Which code object an answer was kept for. Its address is no proof: the next one that is made often comes to lie there (85 % of
// cells that are run again), with names and tables at equal addresses too.
#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030F0000

// By CPython's own number, which no two code objects of an interpreter share. So for those of one interpreter only.
class CodeIdentity {
 public:
  // False where the numbers are used up: then there is no proof, and nothing may be kept.
  bool take(PyCodeObject* code, int) noexcept {
    version_ = code->co_version;
    return version_ != 0;
  }
  bool is(const PyCodeObject* code) const noexcept { return version_ == code->co_version; }

 private:
  std::uint32_t version_ = 0;
};

#else

// By a weak reference, which ends with the object: one that has come to its address since is not what it refers to. With the GIL,
// as all that is done with references.
class CodeIdentity {
 public:
  CodeIdentity() = default;
  CodeIdentity(CodeIdentity&& other) noexcept : reference_(std::exchange(other.reference_, nullptr)) {}
  CodeIdentity& operator=(CodeIdentity&& other) noexcept {
    std::swap(reference_, other.reference_);
    return *this;
  }
  ~CodeIdentity() { Py_XDECREF(reference_); }

  // False, and nothing may be kept, if there is no memory. A pending Python error stays as it is.
  bool take(PyCodeObject* code, int) noexcept;
  bool is(const PyCodeObject* code) const noexcept {
    const auto* reference = reinterpret_cast<const PyWeakReference*>(reference_);
    return reference->wr_object == reinterpret_cast<const PyObject*>(code);
  }

 private:
  PyObject* reference_ = nullptr;
};

#endif

// The same for a thread that does not hold the GIL.
#ifdef BRIDGE_READS_FRAMES
#if PY_VERSION_HEX >= 0x030C0000
using LineIdentity = CodeIdentity;
using NameIdentity = CodeIdentity;
#else

// Equal bytes? Most are names, for which a call of memcmp costs more than this.
[[gnu::always_inline]] inline bool equal_bytes(const char* one, const char* other, std::size_t count) noexcept {
  const auto word = [](const char* at) {
    std::uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  if (count < sizeof(std::uint64_t)) return std::memcmp(one, other, count) == 0;
  const std::size_t last = count - sizeof(std::uint64_t);
  std::uint64_t differ = word(one + last) ^ word(other + last);
  for (std::size_t at = 0; at < last; at += sizeof(std::uint64_t)) differ |= word(one + at) ^ word(other + at);
  return differ == 0;
}

// A text of one's own, for comparing.
class KeptText {
 public:
  void keep(const Text& text) {
    bytes_.assign(text.bytes);
    width_ = text.width;
  }
  [[gnu::always_inline]] bool is(const Text& text) const noexcept {
    return text.width == width_ && text.bytes.size() == bytes_.size() &&
           equal_bytes(text.bytes.data(), bytes_.data(), bytes_.size());
  }

 private:
  std::string bytes_;
  int width_ = 0;
};

// By the name of its file, which is all that says whose it is. Where the function does, too, nothing is kept.
class NameIdentity {
 public:
  bool take(PyCodeObject* code, int) noexcept {
    const Text file = text_of(code->co_filename);
    if (file.size() > 0 && file.at(0) == '<') return false;
    try {
      file_.keep(file);
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  [[gnu::always_inline]] bool is(const PyCodeObject* code) const noexcept { return file_.is(text_of(code->co_filename)); }

 private:
  KeptText file_;
};

// By all that decides the line: the answer is a function of these bytes, so equal bytes are an equal answer, whoever owns them.
class LineIdentity {
 public:
  bool take(PyCodeObject* code, int instruction) noexcept {
    std::size_t decided = 0;
    line_of(code, instruction, &decided);
    try {
      table_.assign(PyBytes_AS_STRING(code->co_linetable), decided);
      file_.keep(text_of(code->co_filename));
      function_.keep(text_of(code->co_qualname));
    } catch (const std::bad_alloc&) {
      return false;
    }
    first_line_ = code->co_firstlineno;
    return true;
  }
  [[gnu::always_inline]] bool is(const PyCodeObject* code) const noexcept {
    return code->co_firstlineno == first_line_ &&
           static_cast<std::size_t>(PyBytes_GET_SIZE(code->co_linetable)) >= table_.size() &&
           equal_bytes(PyBytes_AS_STRING(code->co_linetable), table_.data(), table_.size()) &&
           file_.is(text_of(code->co_filename)) && function_.is(text_of(code->co_qualname));
  }

 private:
  KeptText file_, function_;
  std::string table_;
  int first_line_ = 0;
};

#endif
#endif

}  // namespace rmm_bridge
