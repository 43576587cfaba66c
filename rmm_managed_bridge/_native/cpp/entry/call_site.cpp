#include "entry/call_site.hpp"

#include <algorithm>
#include <memory>
#include <utility>

namespace rmm_bridge {

#if PY_VERSION_HEX < 0x030C0000 || PY_VERSION_HEX >= 0x030F0000
bool CodeIdentity::take(PyCodeObject* code, int) noexcept {
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

namespace {

// Frames that are looked at. Whoever is deeper in a library has its innermost line.
constexpr int kMostFrames = 128;

// What a walk outwards comes to.
struct Found {
  struct Frame {
    PyCodeObject* code = nullptr;
    int instruction = 0;
  };
  Frame site, via;
  Owner owner = Owner::program;  // of the site's code
};

template <typename OwnerOf>
[[gnu::always_inline]] inline Found find_outwards(PyThreadState* thread, OwnerOf owner_of) noexcept {
  Found::Frame library, generated;
  bool library_within = false;  // the library's frame lies within the generated one
  Found found;
  int left = kMostFrames;
  visit_frames(thread, [&](PyCodeObject* code, int instruction) {
    switch (owner_of(code)) {
      case Owner::program:
        found.site = {code, instruction};
        return true;
      case Owner::library:
        if (library.code == nullptr) library = {code, instruction};
        break;
      case Owner::generated:
        if (generated.code == nullptr) {
          generated = {code, instruction};
          library_within = library.code != nullptr;
        }
        break;
      case Owner::hidden:
        break;
    }
    return --left == 0;
  });
  if (found.site.code != nullptr) {
    found.via = library;
  } else if (generated.code != nullptr) {
    found.owner = Owner::generated;
    found.site = generated;
    if (library_within) found.via = library;
  } else {
    found.owner = Owner::library;
    found.site = library;
  }
  return found;
}

std::uint32_t intern(Sites& table, PyCodeObject* code, int instruction, bool library) noexcept {
  return table.intern(text_of(code->co_filename), text_of(code->co_qualname), line_of(code, instruction), library);
}

}  // namespace

template <typename L, typename N>
CallSites<L, N>::CallSites(Sites& table, PyInterpreterState* main, const FileRules* rules)
    : table_(table), rules_(rules), main_(main) {}

template <typename L, typename N>
void CallSites<L, N>::set_rules(const FileRules* rules) noexcept {
  rules_ = rules;
  own_.clear();
  other_.clear();
  owners_.clear();
}

template <typename L, typename N>
std::uint32_t CallSites<L, N>::capture_further_out(PyThreadState* thread) noexcept {
  const Found found = find_outwards(thread, [this](PyCodeObject* code) { return owner_of(code); });
  if (found.site.code == nullptr) return Sites::kNative;
  LineCache& lines = found.owner == Owner::program ? own_ : other_;
  const std::uint32_t site = line(lines, found.site.code, found.site.instruction, found.owner == Owner::library);
  return found.via.code == nullptr ? site : pair(site, line(other_, found.via.code, found.via.instruction, true));
}

template <typename L, typename N>
std::uint32_t CallSites<L, N>::capture_uncached(PyThreadState* thread) noexcept {
  const Found found = find_outwards(
      thread, [this](PyCodeObject* code) { return rules_->owner_of(text_of(code->co_filename), text_of(code->co_qualname)); });
  if (found.site.code == nullptr) return Sites::kNative;
  const std::uint32_t site = intern(table_, found.site.code, found.site.instruction, found.owner == Owner::library);
  if (found.via.code == nullptr) return site;
  return table_.intern_via(site, intern(table_, found.via.code, found.via.instruction, true));
}

template <typename L, typename N>
Owner CallSites<L, N>::owner_of(PyCodeObject* code) noexcept {
  if (const Owner* known = owners_.find(code, 0); known != nullptr) [[likely]]
    return *known;
  const Owner owner = rules_->owner_of(text_of(code->co_filename), text_of(code->co_qualname));
  owners_.put(code, 0, owner);
  return owner;
}

template <typename L, typename N>
std::uint32_t CallSites<L, N>::line(LineCache& lines, PyCodeObject* code, int instruction, bool library) noexcept {
  if (const std::uint32_t* known = lines.find(code, instruction); known != nullptr) [[likely]]
    return *known;
  const std::uint32_t site = intern(table_, code, instruction, library);
  lines.put(code, instruction, site);
  return site;
}

template <typename L, typename N>
std::uint32_t CallSites<L, N>::pair(std::uint32_t site, std::uint32_t via) noexcept {
  Pair& known = pairs_[(site * 31 + via) % pairs_.size()];
  if (known.site != site || known.via != via) known = {site, via, table_.intern_via(site, via)};
  return known.id;
}

template class CallSites<CodeIdentity, CodeIdentity>;
#if defined(BRIDGE_READS_FRAMES) && PY_VERSION_HEX < 0x030C0000
template class CallSites<LineIdentity, NameIdentity>;
#endif

Origin::Origin(Process* process)
    : process(process),
      sites(process->sites, PyInterpreterState_Main(), nullptr),
      process_(*process),
      main_(PyInterpreterState_Main()) {
  rules.push_back(std::make_unique<FileRules>(std::vector<FileRules::Rule>{}));
  newest_rules = rules.back().get();
  sites.set_rules(newest_rules);
}

Origin* new_origin(Process* process, PyObject* tag_variable) {
  auto* origin = new Origin(process);
  Py_INCREF(tag_variable);
  origin->tag_variable = tag_variable;
  return origin;
}

void set_rules(Origin* origin, const std::vector<std::string>& program, const std::vector<std::string>& library,
               const std::vector<std::string>& hidden) {
  std::vector<FileRules::Rule> all;
  for (const auto& [prefixes, owner] :
       {std::pair{&program, Owner::program}, {&library, Owner::library}, {&hidden, Owner::hidden}}) {
    for (const std::string& prefix : *prefixes) all.push_back({prefix, owner});
  }
  auto made = std::make_unique<FileRules>(std::move(all));
  auto& known = origin->rules;
  const auto same = std::find_if(known.begin(), known.end(), [&](const auto& each) { return *each == *made; });
  if (same == known.end()) {
    known.push_back(std::move(made));
  } else {
    std::rotate(same, same + 1, known.end());
  }
  origin->newest_rules = known.back().get();
  origin->sites.set_rules(origin->newest_rules);
}

PyObject* new_str(const Text& text) {
  return PyUnicode_FromKindAndData(text.width, text.bytes.data(), static_cast<Py_ssize_t>(text.size()));
}

}  // namespace rmm_bridge
