// What is known of the code that runs again and again, so that no table is asked. A hit is proven and not believed; nothing that is
// kept here keeps anything of the program alive.
//
// One thread at a time: whoever owns a cache sees to it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "entry/python_code.hpp"

namespace rmm_bridge {

// Sets of four: with one entry each, two of forty frames share a place most of the time.
template <typename Value, std::size_t kSets, typename Identity>
class CodeCache {
 public:
  // Null: not known.
  [[gnu::always_inline]] const Value* find(const PyCodeObject* code, int instruction) const noexcept {
    for (const Entry& entry : sets_[set_of(code, instruction)]) {
      if (entry.code == code && entry.instruction == instruction && entry.identity.is(code)) [[likely]]
        return &entry.value;
    }
    return nullptr;
  }

  void put(PyCodeObject* code, int instruction, Value value) noexcept {
    Identity identity;
    if (!identity.take(code, instruction)) return;
    auto& set = sets_[set_of(code, instruction)];
    Entry* entry = &set[turn_++ % kWays];
    for (Entry& each : set) {
      // A dead one's entry for the same place would be found never, and would stay.
      if (each.code == code && each.instruction == instruction) entry = &each;
    }
    entry->code = code;
    entry->instruction = instruction;
    entry->value = value;
    entry->identity = std::move(identity);
  }

  void clear() noexcept {
    for (auto& set : sets_) {
      for (Entry& entry : set) entry = Entry{};
    }
  }

 private:
  static constexpr std::size_t kWays = 4;
  static_assert((kSets & (kSets - 1)) == 0);

  struct Entry {
    const PyCodeObject* code = nullptr;
    int instruction = 0;
    Value value{};
    Identity identity;
  };

  static std::size_t set_of(const PyCodeObject* code, int instruction) noexcept {
    const std::uint64_t bits = (reinterpret_cast<std::uintptr_t>(code) >> 4) + static_cast<unsigned>(instruction);
    return static_cast<std::size_t>(bits * 0x9E3779B97F4A7C15ull >> 40) % kSets;
  }

  std::array<std::array<Entry, kWays>, kSets> sets_{};
  unsigned turn_ = 0;
};

}  // namespace rmm_bridge
