#include "entry/call_site.hpp"

#include <utility>

namespace rmm_bridge {

#if PY_VERSION_HEX < 0x030C0000 || PY_VERSION_HEX >= 0x030F0000
bool CodeIdentity::take(PyCodeObject* code) noexcept {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  // Making one may collect garbage, and so run Python in the midst of somebody's malloc.
  const int collects = PyGC_Disable();
  PyObject* const reference = PyWeakref_NewRef(reinterpret_cast<PyObject*>(code), nullptr);
  if (collects != 0) PyGC_Enable();
  PyErr_Restore(type, value, traceback);
  if (reference == nullptr) return false;
  Py_XDECREF(std::exchange(reference_, reference));
  return true;
}
#endif

CallSites::CallSites(Sites& table) : table_(table), main_(PyInterpreterState_Main()) {}

void CallSites::set_internal(std::vector<std::string> prefixes) noexcept {
  prefixes_ = std::move(prefixes);
  sites_.clear();
  internal_codes_.clear();
}

bool CallSites::is_internal(const PyCodeObject* code) const noexcept {
  const Text file = text_of(code->co_filename);
  for (const std::string& prefix : prefixes_) {
    if (file.starts_with({prefix, 4})) return true;
  }
  return false;
}

std::uint32_t CallSites::intern(PyCodeObject* code, int instruction) noexcept {
  return table_.intern(text_of(code->co_filename), text_of(code->co_qualname), line_of(code, instruction));
}

bool CallSites::learn_internal(PyCodeObject* code) noexcept {
  const bool internal = is_internal(code);
  internal_codes_.put(code, 0, internal);
  return internal;
}

std::uint32_t CallSites::learn_site(PyCodeObject* code, int instruction) noexcept {
  const std::uint32_t site = intern(code, instruction);
  sites_.put(code, instruction, site);
  return site;
}

std::uint32_t CallSites::capture_uncached(PyThreadState* thread) noexcept {
  std::uint32_t site = Sites::kNative;
  visit_frames(thread, [&](PyCodeObject* code, int instruction) {
    if (is_internal(code)) return false;
    site = intern(code, instruction);
    return true;
  });
  return site;
}

Origin* new_origin(Process* process, PyObject* tag_variable) {
  auto* origin = new Origin(process);
  Py_INCREF(tag_variable);
  origin->tag_variable = tag_variable;
  return origin;
}

void set_internal(Origin* origin, std::vector<std::string> prefixes) { origin->sites.set_internal(std::move(prefixes)); }

PyObject* new_str(const Text& text) {
  return PyUnicode_FromKindAndData(text.width, text.bytes.data(), static_cast<Py_ssize_t>(text.size()));
}

}  // namespace rmm_bridge
