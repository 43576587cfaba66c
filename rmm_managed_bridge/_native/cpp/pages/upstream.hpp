// Where a pool gets its large pieces from.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "pages/kernel.hpp"
#include "pages/page_map.hpp"

namespace rmm_bridge {

class Upstream {
 public:
  virtual ~Upstream() = default;
  // Memory that no device work touches any more, or null. Called without locks and without the GIL, as all here.
  virtual void* allocate(std::size_t bytes) noexcept = 0;
  virtual void deallocate(void* ptr, std::size_t bytes) noexcept = 0;
  virtual bool gives_zeros() const noexcept = 0;
  virtual std::size_t chunk_bytes() const noexcept = 0;
  // Who refused last, for an error's text, and what it said. Called under the pool's lock. Throws std::bad_alloc.
  virtual std::string refused_by() const { return "the kernel"; }

  // Whether pieces join where they touch, and any granules may go back: then they go by `release`. What is below is for such alone.
  virtual bool gives_parts() const noexcept { return false; }

  // Takes whole granules back; false if the kernel refuses, and then they are as they were.
  virtual bool release(char* /*base*/, std::size_t /*bytes*/) noexcept { return false; }

  // Drops whole pages: they read as zeros and take no memory until they are touched. False if the kernel refuses.
  virtual bool clear(char* /*base*/, std::size_t /*bytes*/) noexcept { return false; }

  // Address space for `move` to go to, or null; `release` takes it back.
  virtual char* reserve(std::size_t /*bytes*/) noexcept { return nullptr; }

  // Moves the pages of `from` to a reserved range of more bytes; the rest there reads as zeros. False if the kernel refuses: then `from`
  // is as it was, and what was reserved is not the caller's any more.
  virtual bool move(char* /*from*/, std::size_t /*from_bytes*/, char* /*to*/, std::size_t /*bytes*/) noexcept { return false; }
};

// Anonymous memory straight from the kernel: no CUDA call at all.
class HostUpstream final : public Upstream {
 public:
  // Without `parts` as upstreams of devices are, which take back what they gave and nothing less.
  explicit HostUpstream(bool parts = true, const Kernel& kernel = {}) : parts_(parts), kernel_(kernel) {}

  void* allocate(std::size_t bytes) noexcept override { return map(bytes, PROT_READ | PROT_WRITE); }
  void deallocate(void* ptr, std::size_t bytes) noexcept override { kernel_.unmap(ptr, bytes); }
  bool gives_zeros() const noexcept override { return true; }
  std::size_t chunk_bytes() const noexcept override { return std::size_t{64} << 20; }
  bool gives_parts() const noexcept override { return parts_; }
  bool release(char* base, std::size_t bytes) noexcept override { return kernel_.unmap(base, bytes) == 0; }
  bool clear(char* base, std::size_t bytes) noexcept override { return kernel_.advise(base, bytes, MADV_DONTNEED) == 0; }
  char* reserve(std::size_t bytes) noexcept override;
  bool move(char* from, std::size_t from_bytes, char* to, std::size_t bytes) noexcept override;

 private:
  char* map(std::size_t bytes, int protection) noexcept;
  char* map_below(std::size_t bytes, int protection) noexcept;

  const bool parts_;
  const Kernel kernel_;
  // The run of pieces that lie side by side. Threads that place pieces at once only miss to be neighbours.
  std::atomic<std::uintptr_t> lowest_{0}, run_end_{0};
  std::atomic<bool> moves_{true};
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
