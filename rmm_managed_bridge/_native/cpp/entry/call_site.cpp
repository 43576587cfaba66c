#include "entry/call_site.hpp"

#include <utility>

namespace rmm_bridge {

Origin* new_origin(Process* process, PyObject* tag_variable) {
  auto* origin = new Origin(process);
  Py_INCREF(tag_variable);
  origin->tag_variable = tag_variable;
  return origin;
}

void set_internal(Origin* origin, std::vector<std::string> prefixes) { origin->sites.set_internal(std::move(prefixes)); }

void site_parts(Origin* origin, std::uint32_t site, PyObject** code, int* line) {
  const Site& found = origin->sites.at(site);
  *code = reinterpret_cast<PyObject*>(found.code);
  *line = found.line;
}

}  // namespace rmm_bridge
