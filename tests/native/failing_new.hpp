// An operator new that fails where a test says so: for tests that are programs, in one unit of each.
#pragma once

#include <malloc.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace failing {

// Each thread's own: what others do meanwhile is not what is being tested.
inline thread_local bool armed = false;
inline thread_local long until_failure = 0;
inline thread_local bool failed = false;
inline thread_local long calls = 0;  // while it was armed

inline void* allocate(std::size_t bytes, std::size_t alignment = alignof(std::max_align_t)) {
  if (armed) {
    ++calls;
    if (until_failure-- == 0) {
      failed = true;
      throw std::bad_alloc();
    }
  }
  void* ptr = std::aligned_alloc(alignment, (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment);
  if (ptr == nullptr) throw std::bad_alloc();
  return ptr;
}

// Whoever uses it once more finds no address in it that is one.
inline void release(void* ptr) noexcept {
  if (ptr != nullptr) std::memset(ptr, 0xdb, malloc_usable_size(ptr));
  std::free(ptr);
}

// Makes `call` with operator new failing at the place of this number, from zero. True if nothing was thrown.
template <typename Call>
bool survives(long place, Call call) {
  failed = false;
  calls = 0;
  until_failure = place;
  armed = true;
  try {
    call();
  } catch (const std::bad_alloc&) {
    armed = false;
    return false;
  }
  armed = false;
  return true;
}

// Makes `call` until it comes through, with one place more each time; `unchanged` looks after each failure.
template <typename Call, typename Unchanged>
long at_each_place(Call call, Unchanged unchanged) {
  long place = 0;
  for (; !survives(place, call); ++place) unchanged();
  return place;
}

}  // namespace failing

// Not inlined: the compiler would take what is freed here for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return failing::allocate(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return failing::allocate(bytes); }
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return failing::allocate(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return failing::allocate(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* ptr) noexcept { failing::release(ptr); }
[[gnu::noinline]] void operator delete[](void* ptr) noexcept { failing::release(ptr); }
[[gnu::noinline]] void operator delete(void* ptr, std::size_t) noexcept { failing::release(ptr); }
[[gnu::noinline]] void operator delete[](void* ptr, std::size_t) noexcept { failing::release(ptr); }
[[gnu::noinline]] void operator delete(void* ptr, std::align_val_t) noexcept { failing::release(ptr); }
[[gnu::noinline]] void operator delete[](void* ptr, std::align_val_t) noexcept { failing::release(ptr); }
[[gnu::noinline]] void operator delete(void* ptr, std::size_t, std::align_val_t) noexcept { failing::release(ptr); }
[[gnu::noinline]] void operator delete[](void* ptr, std::size_t, std::align_val_t) noexcept { failing::release(ptr); }
