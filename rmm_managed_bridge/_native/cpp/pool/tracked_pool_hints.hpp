// Heap, the part about hints: what is asked of the driver when a block is made, and taken back when it ends. Included by
// tracked_pool.hpp.
#pragma once

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

template <typename Note>
bool Heap::note_hint(Process& process, const void* ptr, Note note) {
  const Found found = find(process, ptr);
  if (found.block == nullptr || (found.block->flags.load() & Block::kLive) == 0) return false;
  const auto start = reinterpret_cast<std::uintptr_t>(found.start);
  note(start);
  if (mark(process, found.block, Block::kHinted)) return true;
  process.hints.end(start);
  return false;
}

[[gnu::noinline]] inline void Heap::prefetch_new(void* ptr, std::size_t bytes, CUstream stream) noexcept {
  if (ptr == nullptr) return;
  process().new_blocks.counts[try_prefetch(ptr, bytes, stream)].fetch_add(1, std::memory_order_relaxed);
}

inline NewBlocks::Outcome Heap::try_prefetch(void* ptr, std::size_t bytes, CUstream stream) noexcept {
  if (kind_ == kHostKind) return NewBlocks::host;
  if (kind_ != kManagedKind || !ordered()) return NewBlocks::not_managed;
  if (options().device_wait) return NewBlocks::no_concurrent_access;
  const Driver& driver = process().driver;
  std::size_t memory = 0;
  if (driver.device_memory(&memory, device_) == CUDA_SUCCESS && bytes > memory) return NewBlocks::larger_than_device;
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<std::uintptr_t>(ptr);
  const std::uintptr_t low = start / page * page, high = (start + bytes + page - 1) / page * page;
  CUmemLocation here{};
  here.type = CU_MEM_LOCATION_TYPE_DEVICE;
  here.id = device_;
  {
    DriverScope scope(&driver, events()->context());
    // `allocate` does not ask about the legacy stream, which a capture of any blocking stream bars.
    if (events()->capture_status(stream) != CU_STREAM_CAPTURE_STATUS_NONE) return NewBlocks::capturing;
    if (driver.mem_prefetch(low, high - low, here, 0, stream) != CUDA_SUCCESS) return NewBlocks::refused;
  }
  try {
    note_hint(process(), ptr, [&](std::uintptr_t block) { process().hints.place(block, device_); });
  } catch (const std::bad_alloc&) {  // then nobody can tell where the block was asked to be
  }
  return NewBlocks::done;
}

// The block is nobody's, and nobody may have it yet: its next owner inherits no advice. Does not wait for the device.
// A call that the driver refuses leaves the advice: it changes speed, never contents.
inline void Heap::end_hints(void* ptr) noexcept {
  const Hinted ended = process().hints.end(reinterpret_cast<std::uintptr_t>(ptr));
  if (ended.low == ended.high || events() == nullptr) return;
  const Driver& driver = process().driver;
  DriverScope scope(&driver, events()->context());
  auto undo = [&](CUmem_advise advice, int place) {
    CUmemLocation location{};
    location.type = place < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = std::max(place, 0);
    driver.mem_advise(ended.low, ended.high - ended.low, advice, location);
  };
  if ((ended.advice & Hinted::kReadMostly) != 0) undo(CU_MEM_ADVISE_UNSET_READ_MOSTLY, -1);
  if ((ended.advice & Hinted::kPreferred) != 0) undo(CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, -1);
  for (unsigned bit = 0; bit <= Hinted::kCpuBit; ++bit) {
    if ((ended.accessors >> bit & 1) == 0) continue;
    undo(CU_MEM_ADVISE_UNSET_ACCESSED_BY, bit == Hinted::kCpuBit ? -1 : static_cast<int>(bit));
  }
}

}  // namespace rmm_bridge
