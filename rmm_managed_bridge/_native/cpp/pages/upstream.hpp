// Where a pool gets its large pieces from.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "pages/page_map.hpp"

namespace rmm_bridge {

class Upstream {
 public:
  virtual ~Upstream() = default;
  // Memory that no device work touches any more, or null. Called without locks and without the GIL.
  virtual void* allocate(std::size_t bytes) noexcept = 0;
  virtual void deallocate(void* ptr, std::size_t bytes) noexcept = 0;
  virtual bool gives_zeros() const noexcept = 0;
  virtual std::size_t chunk_bytes() const noexcept = 0;
  // Who refused last, for an error's text, and what it said. Called under the pool's lock. Throws std::bad_alloc.
  virtual std::string refused_by() const { return "the kernel"; }
};

// Anonymous memory straight from the kernel: no CUDA call at all.
class HostUpstream final : public Upstream {
 public:
  void* allocate(std::size_t bytes) noexcept override {
    // Twice the alignment is reserved and the ends cut off, so that slabs start on a huge page.
    const std::size_t padded = bytes + kAlignment;
    void* raw = ::mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    const auto start = reinterpret_cast<std::uintptr_t>(raw);
    const std::uintptr_t aligned = (start + kAlignment - 1) & ~(kAlignment - 1);
    if (aligned != start) ::munmap(raw, aligned - start);
    if (const std::uintptr_t end = aligned + bytes; end != start + padded) {
      ::munmap(reinterpret_cast<void*>(end), start + padded - end);
    }
    return reinterpret_cast<void*>(aligned);
  }

  void deallocate(void* ptr, std::size_t bytes) noexcept override { ::munmap(ptr, bytes); }
  bool gives_zeros() const noexcept override { return true; }
  std::size_t chunk_bytes() const noexcept override { return std::size_t{64} << 20; }

 private:
  static constexpr std::uintptr_t kAlignment = std::uintptr_t{2} << 20;
};

// From the C library, in pieces of any size: for debug mode, since AddressSanitizer knows where those end.
class MallocUpstream final : public Upstream {
 public:
  void* allocate(std::size_t bytes) noexcept override { return std::malloc(bytes); }
  void deallocate(void* ptr, std::size_t) noexcept override { std::free(ptr); }
  bool gives_zeros() const noexcept override { return false; }
  std::size_t chunk_bytes() const noexcept override { return 0; }
};

}  // namespace rmm_bridge
