// The lines of programs that asked for memory, as text. The text is copied: nothing of the program is kept alive by having asked.
// Standard library only; what a frame or a code object is, entry/ knows.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "base/spin_lock.hpp"

namespace rmm_bridge {

// Characters as CPython has them, of 1, 2 or 4 bytes and always the least that will do: equal bytes of equal width are equal text,
// and nobody converts before somebody reads.
struct Text {
  std::string_view bytes;
  int width = 0;  // 0: could not be read

  std::size_t size() const noexcept { return width == 0 ? 0 : bytes.size() / static_cast<std::size_t>(width); }
  std::uint32_t at(std::size_t index) const noexcept {
    std::uint32_t character = 0;
    static_assert(std::endian::native == std::endian::little);
    std::memcpy(&character, bytes.data() + index * static_cast<std::size_t>(width), static_cast<std::size_t>(width));
    return character;
  }
  // Of any width, since the rest of a name decides the width of its beginning.
  bool starts_with(const Text& prefix, std::size_t from = 0) const noexcept {
    if (prefix.size() + from > size()) return false;
    for (std::size_t index = 0; index < prefix.size(); ++index) {
      if (at(from + index) != prefix.at(index)) return false;
    }
    return true;
  }
  bool operator==(const Text&) const = default;
};

// From any thread. What is in it stays as it is until the process ends, so an id means the same line for ever; what does not fit
// has an id of its own.
class Sites {
 public:
  static constexpr std::uint32_t kNative = 0;  // no Python frame of the user's
  static constexpr std::uint32_t kOther = 1;   // a line for which there was no room: "other code"

  // Each line has a holder, and every report looks at all holders: 4,096 are 5 to 10 ms. Programs of a million lines allocate at some
  // hundreds. Whoever makes code as it goes ("<lambdifygenerated-7>") would use up any number, so that has a part of its own, and
  // does not push the user's files out.
  static constexpr std::size_t kMost = 4096;
  static constexpr std::size_t kMostGenerated = 1024;
  // Lines of libraries, so that a program which works through many of them keeps room for its own; and pairs of the two, which come
  // on top of all lines.
  static constexpr std::size_t kMostLibrary = 1024;
  static constexpr std::size_t kMostPairs = 2048;
  static constexpr std::size_t kMostThreads = 256;                // named ones that run no Python
  static constexpr std::size_t kLongestText = 4096;               // bytes, of a name
  static constexpr std::size_t kMostText = std::size_t{4} << 20;  // bytes, of all

  struct Site {
    Text file;  // these live as long as the table
    Text function;
    int line = 0;
    bool library = false;   // of an installed package, and no line of the program's
    std::uint32_t via = 0;  // the library's line that it went through, which has an id of its own; kNative: none
  };

  SpinLock& lock_for_fork() noexcept { return lock_; }

  // The id of a line, the same for each call. kOther without room or memory.
  std::uint32_t intern(const Text& file, const Text& function, int line, bool library = false) noexcept;

  // The id of the line `site` where it went through the line `via`. Just `site` without room or memory: its line is worth more.
  std::uint32_t intern_via(std::uint32_t site, std::uint32_t via) noexcept;

  // The id of a thread that runs no Python, by its name. kNative without room or memory.
  std::uint32_t intern_thread(std::string_view name) noexcept;

  // Empty texts for kNative and kOther.
  Site at(std::uint32_t id) noexcept;

  std::size_t overhead_bytes() noexcept;

 private:
  struct Name {
    std::string bytes;
    int width = 0;
    operator Text() const noexcept { return {bytes, width}; }
  };
  struct NameHash {
    using is_transparent = void;
    std::size_t operator()(const Text& text) const noexcept { return std::hash<std::string_view>{}(text.bytes); }
  };
  struct NameEqual {
    using is_transparent = void;
    bool operator()(const Text& one, const Text& other) const noexcept { return one == other; }
  };
  struct Place {
    const Name* file = nullptr;
    const Name* function = nullptr;
    int line = 0;
    bool library = false;
    std::uint32_t via = kNative;
    bool operator==(const Place&) const = default;
  };
  struct PlaceHash {
    std::size_t operator()(const Place& place) const noexcept {
      const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(place.file) * 0x9E3779B97F4A7C15ull ^
                                 (reinterpret_cast<std::uintptr_t>(place.function) + static_cast<unsigned>(place.line) +
                                  (std::uint64_t{place.via} << 32)) *
                                     0xC2B2AE3D27D4EB4Full;
      return static_cast<std::size_t>(bits ^ (bits >> 29));
    }
  };

  std::uint32_t add(const Text& file, const Text& function, int line, bool library);
  std::uint32_t add(const Place& place);
  const Name* find(const Text& text) const;
  const Name* keep(const Text& text);

  SpinLock lock_;
  std::unordered_set<Name, NameHash, NameEqual> names_;  // whose elements never move
  std::unordered_map<Place, std::uint32_t, PlaceHash> index_;
  std::deque<Place> places_;
  std::size_t text_bytes_ = 0;
  std::size_t generated_ = 0;
  std::size_t library_ = 0;
  std::size_t pairs_ = 0;
  std::size_t threads_ = 0;
};

}  // namespace rmm_bridge
