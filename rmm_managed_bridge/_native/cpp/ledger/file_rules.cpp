#include "ledger/file_rules.hpp"

#include <string_view>

namespace rmm_bridge {

namespace {

bool starts_with(const Text& text, std::string_view ascii, std::size_t from = 0) noexcept {
  return text.starts_with({ascii, 1}, from);
}

// Where the last of them ends, 0 without one.
std::size_t end_of_packages(const Text& file) noexcept {
  std::size_t end = 0;
  for (std::size_t from = 0; from < file.size(); ++from) {
    if (from > 0 && file.at(from - 1) != '/') continue;
    for (const std::string_view folder : {"site-packages/", "dist-packages/"}) {
      if (starts_with(file, folder, from)) end = from + folder.size();
    }
  }
  return end;
}

// Names in <...> are no files. What a person typed or handed over as text is the program's.
Owner owner_of_text(const Text& file, const Text& function) noexcept {
  if (starts_with(file, "<frozen ")) return Owner::library;
  if (starts_with(file, "<__array_function__")) return Owner::hidden;
  // `python -c` and `exec` have this name, and so have the methods that dataclasses make of a class.
  if (starts_with(file, "<string>")) return starts_with(function, "__create_fn__.") ? Owner::generated : Owner::program;
  // The last stands for what the bridge tries by itself, which is no line of whoever called it.
  for (const std::string_view typed :
       {"<stdin", "<ipython-input-", "<python-input-", "<timeit-src>", "<doctest ", "<command-", "<rmm_managed_bridge: "}) {
    if (starts_with(file, typed)) return Owner::program;
  }
  return Owner::generated;
}

}  // namespace

Owner FileRules::owner_of(const Text& file, const Text& function) const noexcept {
  if (file.size() > 0 && file.at(0) == '<') return owner_of_text(file, function);
  std::size_t longest = end_of_packages(file);
  Owner owner = longest > 0 ? Owner::library : Owner::program;
  for (const Rule& rule : rules_) {
    const Text prefix{rule.prefix, 4};
    if (prefix.size() > longest && file.starts_with(prefix)) {
      longest = prefix.size();
      owner = rule.owner;
    }
  }
  return owner;
}

}  // namespace rmm_bridge
