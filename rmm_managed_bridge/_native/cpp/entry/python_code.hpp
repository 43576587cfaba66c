// What is read of a code object: its names, the line of an instruction, and whether it is the one that was seen before.
//
// Only what is fixed when the object is made is read, and nothing of it is counted, cached or called: so a thread may read the code
// of its own frames also without the GIL (docs/design/call_sites.md).
#pragma once

#include <Python.h>

#include <cstdint>
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
inline int line_of(const PyCodeObject* code, int instruction) noexcept {
  // Entries of a first byte 1kkkklll (kind, code units - 1) and bytes below 0x80: Objects/locations.md of CPython.
  constexpr int kShort = 10, kShortest = 12, kNoColumns = 13, kLong = 14, kNoLine = 15;
  const auto* at = reinterpret_cast<const unsigned char*>(PyBytes_AS_STRING(code->co_linetable));
  const unsigned char* const end = at + PyBytes_GET_SIZE(code->co_linetable);
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
    if (unit < next) return kind == kNoLine ? -1 : line;
    while (at < end && (*at & 0x80) == 0) ++at;
  }
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
  bool take(PyCodeObject* code) noexcept {
    version_ = code->co_version;
    return version_ != 0;
  }
  bool is(const PyCodeObject* code) const noexcept { return version_ == code->co_version; }

 private:
  std::uint32_t version_ = 0;
};

#else

// By a weak reference, which ends with the object: one that has come to its address since is not what it refers to. With the GIL,
// as all that is done with references; without it content would have to be compared.
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
  bool take(PyCodeObject* code) noexcept;
  bool is(const PyCodeObject* code) const noexcept {
    const auto* reference = reinterpret_cast<const PyWeakReference*>(reference_);
    return reference->wr_object == reinterpret_cast<const PyObject*>(code);
  }

 private:
  PyObject* reference_ = nullptr;
};

#endif

}  // namespace rmm_bridge
