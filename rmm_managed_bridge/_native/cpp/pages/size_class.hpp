// Sizes that blocks come in: multiples of a unit up to 8 units, then 8 steps to each doubling, so that no block is
// more than 12.5 % larger than what was asked above 8 units. Arithmetic is checked by the caller: see kLargestRequest.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace rmm_bridge {

// NumPy's SIMD loops like 64; CuPy promises 512 (its ALLOCATION_UNIT_SIZE), RMM 256 (CUDA_ALLOCATION_ALIGNMENT).
inline constexpr std::size_t kCpuUnit = 64;
inline constexpr std::size_t kGpuUnit = 512;

// Which kind of code mostly uses a block. CPU and GPU blocks never share a 64 KiB page: mixed, small-block work is
// 2 to 3 times slower, since the pages travel with every access.
enum class Side : std::uint8_t { cpu, gpu };

constexpr std::size_t unit_of(Side side) { return side == Side::cpu ? kCpuUnit : kGpuUnit; }

// No user address space on x86-64 or aarch64 is larger; rounding up cannot wrap below it.
inline constexpr std::size_t kLargestRequest = std::size_t{1} << 47;

// Blocks up to this size share slabs; larger ones have a span of their own.
inline constexpr std::size_t kLargestSmall = std::size_t{2} << 20;

struct SizeClass {
  std::uint32_t index;
  std::size_t bytes;
};

// `bytes` is at least 1 and at most kLargestRequest.
[[gnu::always_inline]] constexpr SizeClass size_class(std::size_t bytes, std::size_t unit) {
  const std::size_t units = (bytes + unit - 1) / unit;
  if (units <= 8) return {static_cast<std::uint32_t>(units - 1), units * unit};
  const unsigned width = std::bit_width(units - 1);
  const std::size_t step = std::size_t{1} << (width - 4);
  const std::size_t multiple = (units + step - 1) / step;
  return {static_cast<std::uint32_t>(8 + (width - 4) * 8 + (multiple - 9)), multiple * step * unit};
}

// How many there are. Of the unit that makes more of them; alone (debug mode), all blocks are of the first.
inline constexpr std::uint32_t kSizeClasses = size_class(kLargestRequest, kCpuUnit).index + 1;

// Rare: devices and NumPy ask for no more than the unit.
// The smallest class of at least `bytes` whose blocks are all aligned to `alignment`, a power of two.
[[gnu::noinline]] constexpr SizeClass aligned_class(std::size_t bytes, std::size_t alignment, std::size_t unit) {
  SizeClass found = size_class(bytes, unit);
  while ((found.bytes & (alignment - 1)) != 0) found = size_class(found.bytes + 1, unit);
  return found;
}

}  // namespace rmm_bridge
