// The kernel's calls about address space, in a table: tests put in others, which refuse.
#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace rmm_bridge {

struct Kernel {
  void* (*map)(void* address, std::size_t bytes, int protection, int flags, int file, off_t offset) = ::mmap;
  int (*unmap)(void* base, std::size_t bytes) = ::munmap;
  int (*advise)(void* base, std::size_t bytes, int advice) = ::madvise;
  void* (*remap)(void* from, std::size_t from_bytes, std::size_t bytes, int flags,
                 void* to) = [](void* from, std::size_t from_bytes, std::size_t bytes, int flags, void* to) {
    return ::mremap(from, from_bytes, bytes, flags, to);
  };
};

}  // namespace rmm_bridge
