#include "pages/upstream.hpp"

#include <algorithm>

#include "pages/hugepages.hpp"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace rmm_bridge {

namespace {

constexpr std::uintptr_t kAlignment = kHugePage;  // so that large blocks may have huge pages throughout
constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS;

// A run goes down through the address space as pieces come and go, and the page map remembers each place for good: 8 bytes for a granule.
// So a run begins again where the kernel finds room, which is in the holes that it has left behind.
constexpr std::uintptr_t kLongestRun = std::uintptr_t{64} << 30;

}  // namespace

// Right below the lowest piece, so that free memory of both joins. Left to itself the kernel puts a gap between pieces that are aligned.
char* HostUpstream::map_below(std::size_t bytes, int protection) noexcept {
  const std::uintptr_t lowest = lowest_.load();
  if (!parts_ || bytes % kAlignment != 0 || lowest < 2 * bytes || run_end_.load() - lowest > kLongestRun) return nullptr;
  auto* const place = reinterpret_cast<void*>(lowest - bytes);
  void* const found = kernel_.map(place, bytes, protection, kPrivate | MAP_FIXED_NOREPLACE, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  if (found != place) {  // before Linux 4.17 it is a hint
    kernel_.unmap(found, bytes);
    return nullptr;
  }
  lowest_.store(lowest - bytes);
  return static_cast<char*>(found);
}

char* HostUpstream::map(std::size_t bytes, int protection) noexcept {
  if (char* below = map_below(bytes, protection); below != nullptr) return below;
  // Room to align in is reserved, and the ends are cut off.
  const std::size_t padded = bytes + kAlignment;
  void* raw = kernel_.map(nullptr, padded, protection, kPrivate, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto start = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t aligned = (start + kAlignment - 1) & ~(kAlignment - 1);
  if (aligned != start) kernel_.unmap(raw, aligned - start);
  if (const std::uintptr_t end = aligned + bytes; end != start + padded) {
    kernel_.unmap(reinterpret_cast<void*>(end), start + padded - end);
  }
  // Where it stands for managed memory, a forked child finds nothing there, as of that.
  if (!parts_) kernel_.advise(reinterpret_cast<void*>(aligned), bytes, MADV_DONTFORK);
  run_end_.store(aligned + bytes);
  lowest_.store(aligned);
  return reinterpret_cast<char*>(aligned);
}

char* HostUpstream::reserve(std::size_t bytes) noexcept {
  if (!parts_ || !moves_.load()) return nullptr;
  const std::size_t whole = (bytes + kAlignment - 1) & ~(kAlignment - 1);
  char* base = map(whole, PROT_NONE);
  if (base != nullptr && whole != bytes) kernel_.unmap(base + bytes, whole - bytes);
  return base;
}

bool HostUpstream::move(char* from, std::size_t from_bytes, char* to, std::size_t bytes) noexcept {
  if (kernel_.remap(from, from_bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to) return true;
  // It may have unmapped the range that we reserved before it failed, and another thread may have mapped something there since. Whoever
  // maps it where nothing is has it for sure. Otherwise it stays, and so that this happens once only, nothing is moved any more.
  void* const again = kernel_.map(to, bytes, PROT_NONE, kPrivate | MAP_FIXED_NOREPLACE, -1, 0);
  if (again == MAP_FAILED) {
    moves_.store(false);
  } else {
    kernel_.unmap(again, bytes);
  }
  return false;
}

}  // namespace rmm_bridge
