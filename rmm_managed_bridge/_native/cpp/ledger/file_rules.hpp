// Whose a file is, by the name that its code carries: what a call site names is the program's own line.
// Standard library only. What is in the rules, lifecycle/call_site_filter.py decides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ledger/sites.hpp"

namespace rmm_bridge {

enum class Owner : std::uint8_t {
  program,    // whatever nothing below says: scripts, notebook cells, editable installs, zips
  library,    // an installed package, the standard library
  generated,  // code that somebody made as it went: neither, while the program's own code lies further out
  hidden,     // the bridge itself, which stands between everybody and their memory
};

class FileRules {
 public:
  struct Rule {
    std::string prefix;  // of file names; as UTF-32, with lone surrogates for bytes that are no text
    Owner owner;
    bool operator==(const Rule&) const = default;
  };

  explicit FileRules(std::vector<Rule> rules) : rules_(std::move(rules)) {}

  // The longest rule says it. Without one, a folder site-packages or dist-packages on the way does.
  Owner owner_of(const Text& file, const Text& function) const noexcept;

  bool operator==(const FileRules&) const = default;

 private:
  std::vector<Rule> rules_;
};

}  // namespace rmm_bridge
