// What the ledger writes down: who holds, how much, and each live block. Standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace rmm_bridge {

struct HolderKey {
  std::uint32_t site = 0;
  std::uint32_t tag = 0;
  std::int16_t device = -1;
  std::uint8_t framework = 0;
  std::uint8_t kind = 0;

  // Two comparisons instead of five, of numbers in registers: comparing the bytes of a key that was just put together would
  // wait for the stores of its fields.
  [[gnu::always_inline]] bool operator==(const HolderKey& other) const noexcept {
    return high() == other.high() && low() == other.low();
  }
  struct Hash {
    std::size_t operator()(const HolderKey& key) const noexcept {
      const std::uint64_t bits = key.high() * 0x9E3779B97F4A7C15ull ^ key.low() * 0xC2B2AE3D27D4EB4Full;
      return static_cast<std::size_t>(bits ^ (bits >> 29));
    }
  };

 private:
  std::uint64_t high() const noexcept { return std::uint64_t{tag} << 32 | site; }
  std::uint64_t low() const noexcept {
    return std::uint32_t{kind} << 24 | std::uint32_t{framework} << 16 | static_cast<std::uint16_t>(device);
  }
};

struct Usage {
  std::int64_t current_bytes = 0;
  std::int64_t current_count = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t total_bytes = 0;
  std::int64_t total_count = 0;
  std::int64_t at_peak_bytes = 0;  // what was held when the sum over all holders was highest
  std::int64_t at_peak_count = 0;

  // All but the peak, which is not a sum.
  Usage& operator+=(const Usage& other) noexcept {
    current_bytes += other.current_bytes;
    current_count += other.current_count;
    total_bytes += other.total_bytes;
    total_count += other.total_count;
    at_peak_bytes += other.at_peak_bytes;
    at_peak_count += other.at_peak_count;
    return *this;
  }
};

struct Entry {
  std::uintptr_t ptr = 0;
  std::uint64_t bytes = 0;
  std::uint64_t serial = 0;
  std::uint64_t stream = 0;
  std::int64_t time_ns = 0;
  std::uint32_t thread = 0;
  std::uint32_t holder = 0;
  std::uint32_t resized_count = 0;

  // As `*this = other`, which the compiler does 16 bytes at a time: that waits for the stores of 8 bytes that have just made
  // `other` (5 ns, a tenth of a pair).
  void fill(const Entry& other) noexcept {
    auto put = [](auto& field, auto value) { *const_cast<volatile std::remove_reference_t<decltype(field)>*>(&field) = value; };
    put(ptr, other.ptr);
    put(bytes, other.bytes);
    put(serial, other.serial);
    put(stream, other.stream);
    put(time_ns, other.time_ns);
    put(thread, other.thread);
    put(holder, other.holder);
    put(resized_count, other.resized_count);
  }
};
static_assert(sizeof(Entry) <= 64, "an entry, its index and its slack stay under 128 bytes a live allocation");

}  // namespace rmm_bridge
