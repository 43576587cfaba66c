#include "pages/fork_mirror.hpp"

#include <algorithm>
#include <utility>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace rmm_bridge {

namespace {

constexpr int kCopies = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

void ForkMirror::begin() noexcept {
  for (auto& [number, tile] : tiles_) tile.wanted.reset();
}

void ForkMirror::want(std::uintptr_t low, std::uintptr_t high) {
  for (std::uintptr_t number = low / kHugePage; number * kHugePage < high; ++number) {
    auto found = tiles_.find(number);
    if (found == tiles_.end()) {
      std::scoped_lock lock(lock_);
      found = tiles_.emplace(number, Tile{}).first;
    }
    const std::uintptr_t base = number * kHugePage;
    const std::uintptr_t first = (std::max(low, base) - base) / page_bytes;
    const std::uintptr_t last = (std::min(high, base + kHugePage) - base + page_bytes - 1) / page_bytes;
    for (std::uintptr_t page = first; page < last; ++page) found->second.wanted.set(page);
  }
}

std::size_t ForkMirror::wanted_bytes() const noexcept {
  std::size_t pages = 0;
  for (const auto& [number, tile] : tiles_) pages += tile.wanted.count();
  return pages * page_bytes;
}

// One mapping for all that is new, in the order of the addresses: neighbours stay neighbours, and a child moves them in one call.
bool ForkMirror::make_room() noexcept {
  std::size_t count = 0;
  for (const auto& [number, tile] : tiles_) count += tile.copy == nullptr && tile.wanted.any();
  if (count == 0) return true;
  const std::size_t bytes = count * kHugePage;
  void* const raw = kernel_.map(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, kCopies, -1, 0);
  if (raw == MAP_FAILED) return false;
  const auto start = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t base = (start + kHugePage - 1) & ~(kHugePage - 1);
  if (base != start) kernel_.unmap(raw, base - start);
  if (base != start + kHugePage) kernel_.unmap(reinterpret_cast<void*>(base + bytes), start + kHugePage - base);
  auto* at = reinterpret_cast<char*>(base);
  // A tile with few pages in it takes no more memory than those.
  char* run = at;
  bool huge = false;
  const auto advise = [&](char* end) {
    if (end != run) kernel_.advise(run, static_cast<std::size_t>(end - run), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    run = end;
  };
  std::scoped_lock lock(lock_);
  ++mappings_;
  for (auto& [number, tile] : tiles_) {
    if (tile.copy != nullptr || tile.wanted.none()) continue;
    tile.huge = tile.wanted.count() * page_bytes >= kHugePage / 2;
    if (tile.huge != huge) advise(at);
    huge = tile.huge;
    tile.copy = at;
    tile.mapping = mappings_;
    at += kHugePage;
  }
  advise(at);
  empty_.store(false, std::memory_order_relaxed);
  return true;
}

ForkMirror::Part ForkMirror::part(std::uintptr_t low, std::uintptr_t high) const noexcept {
  const auto found = tiles_.find(low / kHugePage);
  if (found == tiles_.end() || found->second.copy == nullptr) return {};
  const Tile& tile = found->second;
  const std::uintptr_t base = low & ~(kHugePage - 1);
  high = std::min(high, base + kHugePage);
  std::uintptr_t page = (low - base) / page_bytes;
  const bool known = tile.known.test(page);
  while (base + page * page_bytes < high && tile.known.test(page) == known) ++page;
  return {tile.copy + (low - base), std::min(high, base + page * page_bytes) - low, known};
}

void ForkMirror::unmap(Tile& tile) noexcept {
  if (tile.copy != nullptr) kernel_.unmap(tile.copy, kHugePage);
  tile.copy = nullptr;
}

void ForkMirror::show() noexcept {
  std::scoped_lock lock(lock_);
  for (auto tile = tiles_.begin(); tile != tiles_.end();) {
    tile->second.known = tile->second.wanted;
    if (tile->second.known.any()) {
      ++tile;
      continue;
    }
    unmap(tile->second);
    tile = tiles_.erase(tile);
  }
  shown_ = true;
}

void ForkMirror::end() noexcept {
  std::scoped_lock lock(lock_);
  shown_ = false;
  for (auto tile = tiles_.begin(); tile != tiles_.end();) {
    if (tile->second.known.any()) {
      ++tile;
      continue;
    }
    unmap(tile->second);
    tile = tiles_.erase(tile);
  }
  empty_.store(tiles_.empty(), std::memory_order_relaxed);
}

void ForkMirror::drop() noexcept {
  Tiles dropped;
  {
    std::scoped_lock lock(lock_);
    dropped.swap(tiles_);
    shown_ = false;
    empty_.store(true, std::memory_order_relaxed);
  }
  for (auto& [number, tile] : dropped) unmap(tile);
}

// Where something lies already, the child keeps that and not the copy.
void ForkMirror::move(const Run& run) noexcept {
  if (run.bytes == 0) return;
  void* const place = reinterpret_cast<void*>(run.low);
  void* const found = kernel_.map(place, run.bytes, PROT_NONE, kCopies | MAP_FIXED_NOREPLACE, -1, 0);
  if (found == place) {
    if (kernel_.remap(run.copy, run.bytes, run.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place) return;
    kernel_.unmap(place, run.bytes);
  } else if (found != MAP_FAILED) {  // before Linux 4.17 it is a hint
    kernel_.unmap(found, run.bytes);
  }
  for (std::uintptr_t at = run.low; at < run.low + run.bytes; at += page_bytes) {
    placed_.find(at / kHugePage)->second.known.reset(at % kHugePage / page_bytes);
  }
  kernel_.unmap(run.copy, run.bytes);
}

void ForkMirror::place() noexcept {
  if (tiles_.empty()) return;  // a child of a child has all that there is as its own
  if (!shown_) {               // no fork of Python's
    for (auto& [number, tile] : tiles_) unmap(tile);
    empty_.store(true);
    return;
  }
  shown_ = false;
  empty_.store(true);
  placed_.swap(tiles_);
  Run run;
  const Tile* before = nullptr;
  for (auto& [number, tile] : placed_) {
    const Pages known = tile.known;
    for (std::uintptr_t page = 0; page * page_bytes < kHugePage; ++page) {
      if (!known.test(page)) continue;
      const std::uintptr_t low = number * kHugePage + page * page_bytes;
      char* const copy = tile.copy + page * page_bytes;
      const bool same = before != nullptr && before->mapping == tile.mapping && before->huge == tile.huge;
      if (!same || run.low + run.bytes != low || run.copy + run.bytes != copy) {
        move(run);
        run = {low, copy, 0};
      }
      run.bytes += page_bytes;
      before = &tile;
    }
  }
  move(run);
}

std::size_t ForkMirror::placed_bytes(std::uintptr_t low, std::uintptr_t high) const noexcept {
  std::uintptr_t at = low & ~(page_bytes - 1);
  while (at < high) {
    const auto tile = placed_.find(at / kHugePage);
    if (tile == placed_.end()) break;
    const std::uintptr_t base = at & ~(kHugePage - 1), end = std::min(base + kHugePage, high);
    while (at < end && tile->second.known.test((at - base) / page_bytes)) at += page_bytes;
    if (at < end) break;
  }
  return std::clamp(at, low, high) - low;
}

}  // namespace rmm_bridge
