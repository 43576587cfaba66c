// What the test of the slab store knows by itself: pieces of memory, and whose they are.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "pages/slabs.hpp"

namespace rmm_bridge {

struct Known {  // a block that was handed out, and that the store has not got back
  Block* block;
  Span* span;
  SizeClass size;
  Side side;
  bool live;  // else in a bin
  unsigned char mark;
};

struct Piece {  // from upstream; where parts go back, a granule
  std::unique_ptr<Chunk> chunk;
  Side side;
  std::size_t bytes;
  char* base;
  bool zeroed;                // it came so
  std::vector<bool> touched;  // by 64 bytes: was handed out once

  // `used`: where the spans are that have blocks.
  bool is_free(const std::map<char*, char*>& used) const {
    const auto after = used.upper_bound(base);
    const bool before = after != used.begin() && std::prev(after)->second > base;
    return !before && (after == used.end() || after->first >= base + bytes);
  }
};

struct Granule {  // as the page map and its span have it
  Span* span;
  Span::State state;
  bool zeroed;
  bool operator==(const Granule&) const = default;
};

// Pieces that often lie right behind each other; one that was given back is out of bounds for good.
class Area {
 public:
  char* allocate(std::size_t bytes, bool apart) {
    bytes += apart ? kGranule : 0;
    if (static_cast<std::size_t>(end_ - next_) < bytes) {
      constexpr std::size_t kBytes = std::size_t{1} << 30;
      void* raw = ::mmap(nullptr, kBytes + kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (raw == MAP_FAILED) std::abort();
      next_ = reinterpret_cast<char*>(round_to_granule(reinterpret_cast<std::uintptr_t>(raw)));
      end_ = next_ + kBytes;
    }
    char* piece = std::exchange(next_, next_ + bytes) + (apart ? kGranule : 0);
    ::mprotect(piece, static_cast<std::size_t>(next_ - piece), PROT_READ | PROT_WRITE);
    return piece;
  }
  void deallocate(char* piece, std::size_t bytes) {
    ::madvise(piece, bytes, MADV_DONTNEED);
    ::mprotect(piece, bytes, PROT_NONE);
  }

 private:
  char* next_ = nullptr;
  char* end_ = nullptr;
};

}  // namespace rmm_bridge
