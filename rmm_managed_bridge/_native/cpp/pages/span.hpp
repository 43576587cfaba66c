// A span is a run of granules that is free, one large block, or a slab of equal small blocks.
//
// Spans and their block tables are never given back to malloc, only used again: a lookup through the page map takes
// no lock and may be reading one while it changes hands. What it reads then is stale, not garbage, and whoever acts
// on it checks again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "pages/page_map.hpp"
#include "pages/size_class.hpp"

namespace rmm_bridge {

class Pool;

struct Chunk {  // one piece of an upstream that takes it back as a whole
  char* base = nullptr;
  std::size_t bytes = 0;
  char* upstream_base = nullptr;  // what upstream gave, before aligning to a granule
  std::size_t upstream_bytes = 0;
  Side side = Side::cpu;
};

struct Block {
  static constexpr std::uint8_t kLive = 1;
  static constexpr std::uint8_t kShown = 2;   // was shown to a device beyond its lane: see Pool::record_stream
  static constexpr std::uint8_t kHinted = 4;  // has an entry in Process::hints, which ends with the block
  static constexpr std::uint8_t kOnCpu = 8;   // a block of a device's that was shown to the CPU
  std::atomic<std::uint32_t> entry{0};        // in the ledger; 0 without tracking
  std::atomic<std::uint16_t> lane{0};
  std::atomic<std::uint8_t> flags{0};
  char* start = nullptr;  // where it lies; the slab that first hands it out writes it, whoever has it in a bin reads it
};

struct Span {
  enum class State : std::uint8_t { unused, free, blocks };
  std::atomic<State> state{State::unused};
  Side side = Side::cpu;
  bool zeroed = false;  // never handed out since upstream gave it as zeros
  Pool* pool = nullptr;
  Chunk* chunk = nullptr;  // null where parts of a piece may go back
  char* base = nullptr;
  std::size_t bytes = 0;
  std::size_t block_bytes = 0;
  std::uint32_t class_index = 0;
  std::uint32_t block_count = 0;
  std::uint32_t carved_count = 0;  // blocks from here on were never handed out
  std::uint32_t idle_count = 0;    // scratch of SlabStore::give_idle
  Span* next_idle = nullptr;       // likewise
  std::atomic<Block*> blocks{nullptr};
  std::uint32_t block_capacity = 0;
  std::uint64_t blocks_per_byte = 0;  // as a fixed-point number: see index_of

  // One block has it all: it is free with its block. A slab may have but one block as well.
  bool large() const noexcept { return block_bytes > kLargestSmall; }

  char* block_at(std::uint32_t index) const noexcept { return base + index * block_bytes; }

  // Dividing takes 10 to 25 cycles, and each free divides. Rounded up, the factor is too large by less than
  // 2^-kFraction; in a slab of up to 2^24 bytes the product is then too large by less than 1 / block_bytes, so its whole
  // part is right, and the product fits, since a slab has at most 2^15 blocks.
  static constexpr unsigned kFraction = 47;
  void set_block_bytes(std::size_t bytes) noexcept {
    block_bytes = bytes;
    blocks_per_byte = ((std::uint64_t{1} << kFraction) + bytes - 1) / bytes;
  }

  // The number of the block that `address` lies in; block_count or more in the rest behind the last block.
  std::uint32_t index_of(const void* address) const noexcept {
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - base);
    if (block_count == 1) return offset < block_bytes ? 0 : 1;
    return static_cast<std::uint32_t>(offset * blocks_per_byte >> kFraction);
  }
};

}  // namespace rmm_bridge
