// Names as UTF-8. Lone surrogates, which Python's file names may have, become what Python's "surrogatepass" makes of them.
#pragma once

#include <cstdint>
#include <string>

#include "ledger/sites.hpp"

namespace rmm_bridge {

// Throws std::bad_alloc.
inline void to_utf8(const Text& text, std::string& out) {
  const auto put = [&](std::uint32_t bits) { out.push_back(static_cast<char>(bits)); };
  out.clear();
  for (std::size_t index = 0; index < text.size(); ++index) {
    const std::uint32_t character = text.at(index);
    if (character < 0x80) {
      put(character);
    } else if (character < 0x800) {
      put(0xC0 | character >> 6);
      put(0x80 | (character & 0x3F));
    } else if (character < 0x10000) {
      put(0xE0 | character >> 12);
      put(0x80 | (character >> 6 & 0x3F));
      put(0x80 | (character & 0x3F));
    } else {
      put(0xF0 | character >> 18);
      put(0x80 | (character >> 12 & 0x3F));
      put(0x80 | (character >> 6 & 0x3F));
      put(0x80 | (character & 0x3F));
    }
  }
}

}  // namespace rmm_bridge
